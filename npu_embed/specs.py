"""Kernel specs: the records of a manifest that describe its kernels, checked.

A spec says which xclbin and which instruction streams a kernel needs, and how large the views are
that it is given. Nothing here opens a file. The records are specified in docs/bundle-format.md;
those of GEMMs are read in gemm_records.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from .errors import BundleError
from .gemm_records import TAGS_OF_STREAMS, GemmRecords, GemmSpec, GemmStream
from .kernel_fields import MAX_DIM, ctx_of, elems_of, insts_of
from .manifest import MANIFEST, Manifest, Record

__all__ = [
    "DEFAULT_MHA",
    "GemmSpec",
    "GemmStream",
    "MhaSpec",
    "Specs",
    "check_words",
    "parse_specs",
]

MAX_WORD = 2**30 - 1

DEFAULT_MHA = "mha"  # the name of attention kernels that need none: one head geometry


@dataclass(frozen=True, slots=True)
class MhaSpec:
    """O = attention(Q, K, V) for texts of up to `rows` tokens: one length bucket.

    name tells apart the head geometries of a model that has several. kv_words and win_words are
    the words of the instruction stream that hold the number of valid keys and the window; the
    engine patches them before a run. Lengths are in bf16 elements.
    """

    rows: int
    name: str
    ctx: str
    insts: str
    q_elems: int
    k_elems: int
    v_elems: int
    o_elems: int
    kv_words: tuple[int, ...]
    win_words: tuple[int, ...]
    line: int

    @property
    def kernel_id(self) -> str:
        """The name of the kernel: `mha_128`, or `mha.full_128` for buckets named `full`."""
        named = "" if self.name == DEFAULT_MHA else f".{self.name}"
        return f"mha{named}_{self.rows}"


@dataclass(frozen=True, slots=True)
class Specs:
    """All kernels of a bundle: GEMMs by key and MHA buckets by name, both in file order.

    The buckets of a name go from short to long.
    """

    gemms: Mapping[str, GemmSpec]
    buckets: Mapping[str, tuple[MhaSpec, ...]]

    @property
    def mhas(self) -> tuple[MhaSpec, ...]:
        """The buckets without a name, or those of the only name; () where there are several."""
        if DEFAULT_MHA in self.buckets or len(self.buckets) != 1:
            return self.buckets.get(DEFAULT_MHA, ())
        return next(iter(self.buckets.values()))

    @property
    def all_gemms(self) -> tuple[GemmSpec, ...]:
        """Every GEMM once, also where it has more than one key."""
        return tuple(dict.fromkeys(self.gemms.values()))

    @property
    def all_mhas(self) -> tuple[MhaSpec, ...]:
        """The buckets of every name."""
        return tuple(mha for buckets in self.buckets.values() for mha in buckets)

    def mha_for(self, rows: int, name: str | None = None) -> MhaSpec | None:
        """The shortest bucket of a name that holds a text of `rows` tokens, or None.

        Without a name, as `mhas` chooses.
        """
        buckets = self.mhas if name is None else self.buckets.get(name, ())
        return next((mha for mha in buckets if mha.rows >= rows), None)


def parse_specs(manifest: Manifest) -> Specs:
    """The kernel specs of a manifest.

    Raises:
        BundleError: a record lacks a field, contradicts itself or another one, or stands in the
            wrong place; the message names its line.
    """
    gemms: dict[str, GemmRecords] = {}
    mhas: dict[str, dict[int, MhaSpec]] = {}
    growing: str | None = None  # the gemm that a stream's record here would belong to
    for record in manifest.records:
        if record.tag in TAGS_OF_STREAMS:
            key = record.field(0, "KEY N" if record.tag == "gemm_chunks" else "KEY ROWS")
            if key != growing:
                raise record.error(f"{record.tag} {key}, wanted it right after gemm {key}")
            gemms[key].add(record)
            continue
        growing = None
        if record.tag == "gemm":
            gemm = GemmRecords.of(record, manifest)
            growing = gemm.first.key
            if growing in gemms:
                first = gemms[growing].first.line
                raise record.error(
                    f"gemm {growing} for the second time (first on line {first}), wanted it once"
                )
            gemms[growing] = gemm
        elif record.tag == "mha":
            mha = _mha(record, manifest)
            buckets = mhas.setdefault(mha.name, {})
            if mha.rows in buckets:
                raise record.error(
                    f"{_shown(mha)} for the second time (first on line "
                    f"{buckets[mha.rows].line}), wanted one a bucket"
                )
            buckets[mha.rows] = mha
    specs = Specs(
        {key: records.spec() for key, records in gemms.items()},
        {name: tuple(rows[n] for n in sorted(rows)) for name, rows in mhas.items()},
    )
    _check_kernel_ids(specs)
    return specs


def check_words(spec: MhaSpec, stream_words: int) -> None:
    """Check that the words to patch lie in an instruction stream of `stream_words` words.

    Raises:
        BundleError: a word index is past the end of the stream.
    """
    for name, words in (("kv_words", spec.kv_words), ("win_words", spec.win_words)):
        if max(words) >= stream_words:
            raise BundleError(
                f"{MANIFEST}:{spec.line}: {_shown(spec)} {name} has word {max(words)}, wanted "
                f"less than the {stream_words} words of {spec.insts}; re-export the bundle."
            )


def _mha(record: Record, manifest: Manifest) -> MhaSpec:
    rows = record.field_int(0, "ROWS", minimum=1, maximum=MAX_DIM)
    kv_words, win_words = _words(record, "kv_words"), _words(record, "win_words")
    if both := sorted(set(kv_words) & set(win_words)):
        raise record.error(
            f"mha {rows} has word {both[0]} in kv_words and in win_words, wanted it in one"
        )
    name = record.get("name") if record.has("name") else DEFAULT_MHA
    if not name:
        raise record.error(f"mha {rows} name is empty, wanted a name or none")
    return MhaSpec(
        rows=rows,
        name=name,
        ctx=ctx_of(record, manifest),
        insts=insts_of(record),
        q_elems=elems_of(record, "q_elems"),
        k_elems=elems_of(record, "k_elems"),
        v_elems=elems_of(record, "v_elems"),
        o_elems=elems_of(record, "o_elems"),
        kv_words=kv_words,
        win_words=win_words,
        line=record.line,
    )


def _shown(mha: MhaSpec) -> str:
    """`mha 128` or `mha 128 name=full`: how errors call a record."""
    return f"mha {mha.rows}" + ("" if mha.name == DEFAULT_MHA else f" name={mha.name}")


def _check_kernel_ids(specs: Specs) -> None:
    """Check that no two kernels share a name, as gemms `a` (2 chunks) and `a_x2` would."""
    lines: dict[str, int] = {}
    streams = (stream for gemm in specs.gemms.values() for stream in gemm.streams)
    named = [(stream.kernel_id, stream.line) for stream in streams]
    for kernel_id, line in [*named, *((mha.kernel_id, mha.line) for mha in specs.all_mhas)]:
        if kernel_id in lines:
            raise BundleError(
                f"{MANIFEST}:{line}: a kernel named {kernel_id}, wanted another name than that of "
                f"line {lines[kernel_id]}; re-export the bundle."
            )
        lines[kernel_id] = line


def _words(record: Record, key: str) -> tuple[int, ...]:
    if words := record.get_ints(key, minimum=0, maximum=MAX_WORD):
        return words
    raise record.error(f"{record.tag} {key} is empty, wanted word indices of the stream")
