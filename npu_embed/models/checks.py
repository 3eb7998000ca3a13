"""What every family checks of a bundle before it allocates or runs anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ..bundle import Bundle
from ..errors import BundleError
from ..manifest import Manifest
from ..specs import GemmSpec, MhaSpec

MAX_BUFFER_BYTES = 4 << 30


def kernels(bundle: Bundle, keys: Sequence[str], *, mha: Iterable[str | None] = ()) -> None:
    """Check that there are GEMMs of these keys, and attention buckets of these names.

    Raises:
        BundleError: naming what is missing.
    """
    missing = [key for key in keys if key not in bundle.specs.gemms]
    missing += [f"mha{_named(name)}" for name in mha if not buckets_of(bundle, name)]
    if missing:
        records = [f"gemm {', '.join(keys)}", *(f"mha{_named(name)}" for name in mha)]
        raise BundleError(
            f"manifest.txt: no {' '.join(missing)} record, {bundle.family} needs "
            f"{' and '.join(records)}; re-export the bundle."
        )


def buckets_of(bundle: Bundle, name: str | None) -> tuple[MhaSpec, ...]:
    """The attention buckets of a name, or those that need none."""
    specs = bundle.specs
    return specs.mhas if name is None else specs.buckets.get(name, ())


def sizes(wanted: Mapping[str, tuple[int, int, int | None]]) -> None:
    """Check sizes of GEMMs: what it is -> (found, lowest, exactly or None).

    Raises:
        BundleError: the first that is too small or not what it must be exactly.
    """
    for name, (found, lowest, exactly) in wanted.items():
        if found < lowest or (exactly is not None and found != exactly):
            relation = "at least" if exactly is None else "exactly"
            raise BundleError(
                f"manifest.txt: gemm {name} is {found}, wanted {relation} {lowest}; "
                "re-export the bundle."
            )


def slices(gemm: GemmSpec, width: int) -> int:
    """How many runs of a GEMM, each over its own K of `width` columns, make one product."""
    return max(1, -(-width // gemm.K))


def slice_sizes(key: str, gemm: GemmSpec, width: int) -> dict[str, tuple[int, int, int | None]]:
    """Sizes of a GEMM over `width` columns whose K may be cut into equal slices, for `sizes`."""
    count = slices(gemm, width)
    if count == 1:
        return {f"{key} K": (gemm.K, width, None)}
    # The last slice's view begins at its column and must end in the one row more.
    room = min((s.rows + 1) * gemm.lda - s.a_elems for s in gemm.streams)
    return {
        f"{key} K x {count} slices": (count * gemm.K, width, width),
        f"{key} lda of {count} slices": (gemm.lda, width, None),
        f"{key} room after a_elems": (room, width - gemm.K, None),
    }


def slice_name(name: str, s: int) -> str:
    """The name of a row buffer for the results of slice s."""
    return name if s == 0 else f"{name}.{s}"


def gemm_views(gemms: Iterable[GemmSpec]) -> None:
    """Check that no view is longer than its rows and the one row more that a buffer has.

    Raises:
        BundleError: naming the record's line.
    """
    for g in gemms:
        for s in g.streams:
            _view(s.line, f"gemm {g.key} a_elems", s.a_elems, (s.rows + 1) * g.lda)
            _view(s.line, f"gemm {g.key} c_elems", s.c_elems, (s.rows + 1) * g.c_stride)


def mha_views(buckets: Iterable[MhaSpec], qkv_stride: int, o_stride: int) -> None:
    """Check that no view is longer than its bucket's rows and one row more.

    Raises:
        BundleError: naming the record's line.
    """
    for mha in buckets:
        for name, elems, stride in (
            ("q_elems", mha.q_elems, qkv_stride),
            ("k_elems", mha.k_elems, qkv_stride),
            ("v_elems", mha.v_elems, qkv_stride),
            ("o_elems", mha.o_elems, o_stride),
        ):
            _view(mha.line, f"mha {mha.rows} {name}", elems, (mha.rows + 1) * stride)


def _view(line: int, name: str, found: int, wanted: int) -> None:
    if found > wanted:
        raise BundleError(
            f"manifest.txt:{line}: {name} is {found}, wanted at most {wanted}, what the rows "
            "hold; re-export the bundle."
        )


def longest_bucket(bundle: Bundle, name: str | None = None) -> None:
    """Check that the longest attention bucket of a name holds the longest text.

    Raises:
        BundleError: it is shorter.
    """
    longest = buckets_of(bundle, name)[-1].rows
    if longest < bundle.max_tokens:
        raise BundleError(
            f"manifest.txt: longest mha bucket{_named(name)} has {longest} rows, wanted max_tokens "
            f"{bundle.max_tokens}; re-export the bundle."
        )


def bucket_heads(bundle: Bundle, name: str | None, wanted: Mapping[str, int]) -> None:
    """Check what the mha records of a name say of their heads, where they say it.

    Raises:
        BundleError: another number than the params have.
    """
    lines = {mha.line for mha in buckets_of(bundle, name)}
    for record in bundle.manifest.tagged("mha"):
        for key, value in wanted.items():
            if record.line in lines and record.has(key) and record.get(key) != str(value):
                raise record.error(
                    f"mha{_named(name)} {key} is {record.get(key)}, wanted {value} by the params"
                )


def buffer_sizes(
    manifest: Manifest, shapes: Iterable[tuple[int, int]], param: str = "max_rows"
) -> None:
    """Check that the row buffers of a pack, of these (rows, elements of a row), may be allocated.

    param is what says how many rows there are.

    Raises:
        BundleError: together they are larger than a sane bundle's would be.
    """
    shapes = list(shapes)
    taken = sum(2 * rows * width for rows, width in shapes)
    if taken > MAX_BUFFER_BYTES:
        widest = max(width for _, width in shapes)
        raise BundleError(
            f"manifest.txt:{manifest.param_lines.get(param, 0)}: the row buffers of {param} "
            f"{manifest.params.get(param)} (the widest has {widest} elements a row) take {taken} "
            f"bytes, wanted at most {MAX_BUFFER_BYTES}; re-export the bundle."
        )


def padded_rows(gemms: Iterable[GemmSpec], rows: int) -> int:
    """Rows that hold `rows` rows in whole chunks of each GEMM, and so in the stream it takes."""
    return max(g.M * -(-rows // g.M) for g in gemms)


def stages(bundle: Bundle, wanted: Sequence[str]) -> None:
    """Check that the manifest names the stages the family computes, no more and no fewer.

    Raises:
        BundleError: other stages, or another order.
    """
    found = list(bundle.manifest.param_list("stages"))
    if found != list(wanted):
        odd = sorted(set(found) ^ set(wanted))
        raise BundleError(
            f"manifest.txt: param stages {','.join(found)}, wanted {','.join(wanted)} "
            f"(not the same: {', '.join(odd) or 'their order'}); update npu-embed or re-export "
            "the bundle."
        )


def choice(manifest: Manifest, name: str, wanted: Iterable[str]) -> str:
    """A param that is one of some words.

    Raises:
        BundleError: it is another.
    """
    found = manifest.param_str(name)
    if found not in wanted:
        raise BundleError(
            f"manifest.txt: param {name} {found}, wanted {', '.join(wanted)}; re-export the bundle."
        )
    return found


def epsilon(manifest: Manifest, name: str) -> float:
    """A param that keeps a norm from dividing by 0: a number above 0 and below 1.

    Raises:
        BundleError: it is not; a large one would make every vector the same.
    """
    found = positive(manifest, name)
    if found >= 1:
        raise BundleError(
            f"manifest.txt: param {name} is {found:g}, wanted a number below 1; re-export the "
            "bundle."
        )
    return found


def positive(manifest: Manifest, name: str) -> float:
    """A param that is a number above 0.

    Raises:
        BundleError: it is not.
    """
    found = manifest.param_float(name)
    if found <= 0:
        raise BundleError(
            f"manifest.txt: param {name} is {found:g}, wanted a number above 0; re-export the "
            "bundle."
        )
    return found


def token_ids(ids: NDArray[np.int32], vocab_size: int) -> None:
    """Check that every id has a row in the table of embeddings.

    Raises:
        BundleError: one has not.
    """
    for found in (int(ids.min()), int(ids.max())):
        if not 0 <= found < vocab_size:
            # Which may come from the tokenizer, from a record or from a stored reference.
            raise BundleError(
                f"manifest.txt: token id {found}, wanted less than vocab_size {vocab_size}"
                f"{' and not negative' if found < 0 else ''}, the rows of the embeddings; what the "
                "id came from belongs to another model, re-export the bundle."
            )


def _named(name: str | None) -> str:
    return "" if name is None else f" name={name}"
