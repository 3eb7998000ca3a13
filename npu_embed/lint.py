"""Lint of a bundle's kernels: streams, words to patch, views, tokens, arguments of xclbins.

Opening a bundle and loading its streams refuses what would compute something wrong. The lint reads
all of them at once, and says as well what a run would hang at or what nobody reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .bundle import GEMM_BUFFERS, MHA_BUFFERS, Bundle
from .containers import argument_layout
from .emulator import txn
from .errors import BundleError
from .manifest import MANIFEST
from .specs import GemmSpec, GemmStream, MhaSpec
from .streamcheck import WORD_BYTES, WORD_ELEMS
from .streamlint import problems


@dataclass(frozen=True, slots=True)
class LintFinding:
    """Something wrong: in which file, on which line of the manifest that names it (0: none)."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        named = f" ({MANIFEST}:{self.line})" if self.line else ""
        return f"{self.file}{named}: {self.text}"


def lint(bundle: Bundle) -> Iterator[LintFinding]:
    """Everything wrong with a bundle's kernels, in the manifest's order."""
    yield from _xclbins(bundle)
    for gemm in bundle.specs.all_gemms:
        for stream in gemm.streams:
            yield from _stream(bundle, gemm, stream)
    for mha in bundle.specs.all_mhas:
        yield from _stream(bundle, mha, mha)


def check_lint(bundle: Bundle) -> None:
    """Check that there is nothing to find.

    Raises:
        BundleError: the first finding, and how many there are.
    """
    if found := list(lint(bundle)):
        more = f" (and {len(found) - 1} more findings)" if len(found) > 1 else ""
        raise BundleError(f"{found[0]}{more}; re-export the bundle.")


def _xclbins(bundle: Bundle) -> Iterator[LintFinding]:
    """Xclbins that cannot be used, whose kernel takes fewer buffers than it is given, or unused."""
    wanted: dict[str, int] = {}
    specs: list[GemmSpec | MhaSpec] = [*bundle.specs.all_gemms, *bundle.specs.all_mhas]
    for spec in specs:
        buffers = GEMM_BUFFERS if isinstance(spec, GemmSpec) else MHA_BUFFERS
        wanted[spec.ctx] = max(wanted.get(spec.ctx, 0), buffers)
    for key, record in bundle.manifest.xclbins.items():
        try:
            layout = argument_layout(bundle.xclbin(key), record.kernel_name)
        except BundleError as error:
            yield _of_error(record.file, record.line, error)
            continue
        if key not in wanted:
            yield LintFinding(record.file, record.line, f"no kernel is in xclbin {key}")
        elif len(layout.buffers) < wanted[key]:
            text = (
                f"kernel {record.kernel_name} takes {len(layout.buffers)} buffers, wanted "
                f"{wanted[key]}"
            )
            yield LintFinding(record.file, record.line, text)


def _stream(
    bundle: Bundle, spec: GemmSpec | MhaSpec, record: GemmStream | MhaSpec
) -> Iterator[LintFinding]:
    """What is wrong with a stream: what it is refused for, and what else there is."""
    file, line = record.insts, record.line
    try:
        stream = txn.decode(bundle.stream(spec, file))
    except BundleError as error:
        yield _of_error(file, line, error)
        return
    views = _views(bundle, spec, record)
    for text in problems(stream, views, array_programs=bundle.has_array_programs):
        yield LintFinding(file, line, text)


def _views(
    bundle: Bundle, spec: GemmSpec | MhaSpec, record: GemmStream | MhaSpec
) -> dict[str, int]:
    """Words of the views of a run's buffers, by their names."""
    if isinstance(record, MhaSpec):
        elems = {"Q": record.q_elems, "K": record.k_elems, "V": record.v_elems}
        elems["O"] = record.o_elems
        return {name: n // WORD_ELEMS for name, n in elems.items()}
    assert isinstance(spec, GemmSpec)
    # No record says how long B is: all streams of a GEMM read as much, which is checked elsewhere.
    packed = bundle.packed_bytes(spec) or 0
    most = packed // WORD_BYTES if packed and not bundle.published else 2**62
    return {"A": record.a_elems // WORD_ELEMS, "B": most, "C": record.c_elems // WORD_ELEMS}


def _of_error(file: str, line: int, error: BundleError) -> LintFinding:
    """A refusal as a finding, its place not said twice."""
    text = str(error).removeprefix(f"{file}: ").removeprefix(f"{MANIFEST}:{line}: ")
    return LintFinding(file, line, text.rstrip("."))
