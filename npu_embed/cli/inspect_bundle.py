"""A bundle as a description (JSON as it is) and as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..bundle import Bundle
from ..emulator import xclbin
from ..errors import BundleError
from ..manifest import bundle_path
from ..specs import GemmSpec, GemmStream, MhaSpec
from .inspect_xclbin import array_program, program_text
from .output import print_table

if TYPE_CHECKING:
    from rich.console import Console

SHOWN_WORDS = 4

_GEMM_COLUMNS = ("key", "context", "chunks", "M", "K", "N", "n_out", "lda", "c_stride")
_NO_ROWS = "none"


def describe(path: Path) -> dict[str, Any]:
    """What a bundle holds, all of its files checked as the engine does when it opens them.

    Raises:
        BundleError: the bundle is damaged.
    """
    bundle = Bundle.open(path)
    try:
        epilogues = _epilogues(bundle)
        return {
            "kind": "bundle",
            "path": str(path),
            "params": dict(bundle.manifest.params),
            "prompts": bundle.prompts,
            "contexts": [_context(bundle, key) for key in bundle.manifest.xclbins],
            "gemms": [
                {**_gemm(bundle, gemm), "epilogue": epilogues[gemm.key]}
                for gemm in bundle.specs.all_gemms
            ],
            "mha": [_mha(bundle, mha) for mha in bundle.specs.all_mhas],
            "tensors": _tensors(bundle),
            "sha256_records": len(bundle.manifest.hashes),
            "references": len(bundle.manifest.tagged("tref")),
        }
    finally:
        bundle.close()


def show(out: Console, described: dict[str, Any], *, words: bool) -> None:
    """Print a description as tables; words: every index to patch, not the first ones only."""
    title = f"{described['path']}: bundle"
    print_table(out, title, ("param", "value"), described["params"].items())
    if described["prompts"]:
        prompts = ((name, repr(text)) for name, text in described["prompts"].items())
        print_table(out, "prompts", ("prompt", "text"), prompts)
    print_table(
        out,
        "contexts",
        ("context", "xclbin", "kernel", "columns", "program"),
        (
            (c["key"], c["xclbin"], c["kernel"], c["columns"], _programs_text(c["programs"]))
            for c in described["contexts"]
        ),
    )
    print_table(
        out,
        "gemm kernels",
        (*_GEMM_COLUMNS, "rows between", "epilogue", "stream words"),
        (
            (
                *(gemm[c] for c in _GEMM_COLUMNS),
                _between(gemm),
                gemm["epilogue"] or "",
                _range(gemm["stream_words"]),
            )
            for gemm in described["gemms"]
        ),
    )
    print_table(
        out,
        "mha buckets",
        ("rows", "name", "context", "stream words", "kv words", "window words"),
        (
            (
                mha["rows"],
                mha["name"],
                mha["context"],
                mha["stream_words"],
                _words(mha["kv_words"], words),
                _words(mha["win_words"], words),
            )
            for mha in described["mha"]
        ),
    )
    tensors = described["tensors"]
    print_table(
        out,
        f"tensors in {tensors['file']}: {tensors['count']}, {tensors['bytes']:,} bytes",
        ("dtype", "tensors", "bytes"),
        ((dtype, t["count"], t["bytes"]) for dtype, t in tensors["dtypes"].items()),
    )
    out.print(
        f"{described['sha256_records']} files with a sha256, {described['references']} reference "
        "texts; `npu-embed check` compares them",
        markup=False,
    )


def _context(bundle: Bundle, key: str) -> dict[str, Any]:
    record = bundle.manifest.xclbins[key]
    try:
        container = xclbin.read(bundle.xclbin(key))
    except xclbin.XclbinError as error:
        raise BundleError(f"{record.file}: no xclbin ({error}); re-export the bundle.") from error
    partition = container.partition
    return {
        "key": key,
        "xclbin": record.file,
        "kernel": record.kernel_name,
        "uuid": container.uuid,
        "columns": 0 if partition is None else partition.column_width,
        "programs": [array_program(pdi) for pdi in (partition.pdis if partition else ())],
    }


def _gemm(bundle: Bundle, gemm: GemmSpec) -> dict[str, Any]:
    return {
        "key": gemm.key,
        "context": gemm.ctx,
        "chunks": gemm.max_rows // gemm.M,
        "max_rows": gemm.max_rows,
        "M": gemm.M,
        "K": gemm.K,
        "N": gemm.N,
        "n_out": gemm.n_out,
        "lda": gemm.lda,
        "c_stride": gemm.c_stride,
        "rows": [stream.rows for stream in gemm.streams],
        "a_elems": [stream.a_elems for stream in gemm.streams],
        "c_elems": [stream.c_elems for stream in gemm.streams],
        "stream_words": [_stream_words(bundle, stream) for stream in gemm.streams],
    }


def _mha(bundle: Bundle, mha: MhaSpec) -> dict[str, Any]:
    return {
        "kernel": mha.kernel_id,
        "rows": mha.rows,
        "name": mha.name,
        "context": mha.ctx,
        "q_elems": mha.q_elems,
        "k_elems": mha.k_elems,
        "v_elems": mha.v_elems,
        "o_elems": mha.o_elems,
        "stream_words": _stream_words(bundle, mha),
        "kv_words": list(mha.kv_words),
        "win_words": list(mha.win_words),
    }


def _stream_words(bundle: Bundle, stream: GemmStream | MhaSpec) -> int:
    path = bundle_path(bundle.path, stream.insts, f"manifest.txt:{stream.line}")
    return path.stat().st_size // 4


def _between(gemm: dict[str, Any]) -> str:
    """The rows of a GEMM's streams that are no whole chunks."""
    return " ".join(str(rows) for rows in gemm["rows"] if rows % gemm["M"]) or _NO_ROWS


def _epilogues(bundle: Bundle) -> dict[str, str | None]:
    """What each gemm record says of its epilogue; only our exporter writes that."""
    return {
        record.fields[0]: record.get("epilogue") if record.has("epilogue") else None
        for record in bundle.manifest.tagged("gemm")
    }


def _tensors(bundle: Bundle) -> dict[str, Any]:
    tensors = bundle.tensors
    sizes = {name: tensors.raw(name).nbytes for name in tensors.names()}
    count: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for name, size_bytes in sizes.items():
        count[tensors.dtype(name)] += 1
        total[tensors.dtype(name)] += size_bytes
    return {
        "file": tensors.file,
        "count": len(sizes),
        "bytes": sum(sizes.values()),
        "dtypes": {dtype: {"count": n, "bytes": total[dtype]} for dtype, n in count.items()},
    }


def _programs_text(programs: Iterable[dict[str, Any] | None]) -> str:
    return "; ".join(program_text(constants) for constants in programs)


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def _words(words: Sequence[int], every: bool) -> str:
    shown = words if every else words[:SHOWN_WORDS]
    more = f" ... ({len(words)})" if len(words) > len(shown) else ""
    return " ".join(map(str, shown)) + more
