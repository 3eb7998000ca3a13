"""Kernel specs: the `gemm`, `gemm_chunks` and `mha` records of a manifest, checked.

A spec says which xclbin and which instruction streams a kernel needs, and how large the views are
that it is given. Nothing here opens a file. The records are specified in docs/bundle-format.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .errors import BundleError
from .manifest import MANIFEST, Manifest, Record

# Bounds are generous; they keep products far from what a size or an offset can hold.
MAX_DIM = 2**31 - 1
MAX_ELEMS = 2**32 - 1
MAX_WORD = 2**30 - 1

DEFAULT_MHA = "mha"  # the name of attention kernels that need none: one head geometry


@dataclass(frozen=True, slots=True)
class GemmSpec:
    """C[rows, N] = A[rows, K] B[K, N], for 1 to len(insts) chunks of M rows each.

    ctx is the key of the xclbin. insts, a_elems and c_elems hold, at index n - 1, the instruction
    stream for n chunks (a path relative to the bundle) and the lengths of the views of A and C,
    in bf16 elements. Rows of A begin lda elements apart, rows of C c_stride. The first n_out
    columns of C are results: fewer than N where the epilogue pairs columns of B.
    """

    key: str
    ctx: str
    insts: tuple[str, ...]
    M: int
    K: int
    N: int
    lda: int
    c_stride: int
    n_out: int
    a_elems: tuple[int, ...]
    c_elems: tuple[int, ...]
    line: int

    @property
    def max_rows(self) -> int:
        """The rows of the longest stream."""
        return len(self.insts) * self.M

    def chunks_for(self, rows: int) -> int:
        """The n = ceil(rows / M) chunks that hold `rows` rows.

        Raises:
            ValueError: rows is less than 1 or more than max_rows.
        """
        if not 1 <= rows <= self.max_rows:
            raise ValueError(f"gemm {self.key}: {rows} rows, wanted 1 to {self.max_rows}.")
        return -(-rows // self.M)

    def kernel_id(self, chunks: int) -> str:
        """The name of the kernel for `chunks` chunks: `qkv`, `qkv_x2`, `qkv_x3` ..."""
        return self.key if chunks == 1 else f"{self.key}_x{chunks}"


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


@dataclass(slots=True)
class _Chunks:
    """A gemm while its gemm_chunks records are read: insts -> the lengths of its views."""

    first: GemmSpec
    views: dict[str, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, gemm: GemmSpec) -> "_Chunks":
        """Those of a gemm record alone."""
        return cls(gemm, {gemm.insts[0]: (gemm.a_elems[0], gemm.c_elems[0])})

    def add(self, record: Record) -> None:
        """Add the stream for one chunk more, which `record` must describe."""
        key, last = self.first.key, len(self.views)
        chunks = record.field_int(1, "KEY N", minimum=1, maximum=MAX_DIM)
        if chunks != last + 1:
            raise record.error(
                f"gemm_chunks {key} {chunks} follows chunk {last}, wanted chunk {last + 1}"
            )
        if record.has("ctx") and record.get("ctx") != self.first.ctx:
            raise record.error(
                f"gemm_chunks {key} {chunks} ctx is {record.get('ctx')}, wanted {self.first.ctx} "
                "as its gemm has"
            )
        insts = _insts(record)
        if insts in self.views:
            raise record.error(
                f"gemm_chunks {key} {chunks} insts is {insts}, which is of fewer chunks, wanted a "
                "stream of its own"
            )
        views = _elems(record, "a_elems"), _elems(record, "c_elems")
        _check_views(self.first, chunks, *views, record)
        self.views[insts] = views

    def gemm(self) -> GemmSpec:
        """The spec with all chunks."""
        a_elems, c_elems = zip(*self.views.values(), strict=True)
        return replace(self.first, insts=tuple(self.views), a_elems=a_elems, c_elems=c_elems)


def parse_specs(manifest: Manifest) -> Specs:
    """The kernel specs of a manifest.

    Raises:
        BundleError: a record lacks a field, contradicts itself or another one, or stands in the
            wrong place; the message names its line.
    """
    gemms: dict[str, _Chunks] = {}
    mhas: dict[str, dict[int, MhaSpec]] = {}
    growing: str | None = None  # the gemm that a gemm_chunks record here would belong to
    for record in manifest.records:
        if record.tag == "gemm_chunks":
            key = record.field(0, "KEY N")
            if key != growing:
                raise record.error(f"gemm_chunks {key}, wanted it right after gemm {key}")
            gemms[key].add(record)
            continue
        growing = None
        if record.tag == "gemm":
            gemm = _gemm(record, manifest)
            if gemm.key in gemms:
                first = gemms[gemm.key].first.line
                raise record.error(
                    f"gemm {gemm.key} for the second time (first on line {first}), wanted it once"
                )
            gemms[gemm.key] = _Chunks.of(gemm)
            growing = gemm.key
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
        {key: chunks.gemm() for key, chunks in gemms.items()},
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


def _gemm(record: Record, manifest: Manifest) -> GemmSpec:
    key = record.field(0, "KEY")
    dim = {
        name: record.get_int(name, minimum=1, maximum=MAX_DIM)
        for name in ("M", "K", "N", "lda", "c_stride")
    }
    # A published record does not say how many columns its epilogue leaves, ours may.
    if record.has("n_out"):
        n_out = record.get_int("n_out", minimum=1, maximum=MAX_DIM)
        if n_out > min(dim["N"], dim["c_stride"]):
            raise record.error(
                f"gemm {key} n_out is {n_out}, wanted at most N {dim['N']} and at most c_stride "
                f"{dim['c_stride']}"
            )
    else:
        n_out = min(dim["N"], dim["c_stride"])
    if dim["lda"] < dim["K"]:
        raise record.error(f"gemm {key} lda is {dim['lda']}, wanted at least K {dim['K']}")
    gemm = GemmSpec(
        key=key,
        ctx=_ctx(record, manifest),
        insts=(_insts(record),),
        **dim,
        n_out=n_out,
        a_elems=(_elems(record, "a_elems"),),
        c_elems=(_elems(record, "c_elems"),),
        line=record.line,
    )
    _check_views(gemm, 1, gemm.a_elems[0], gemm.c_elems[0], record)
    return gemm


def _check_views(gemm: GemmSpec, chunks: int, a_elems: int, c_elems: int, record: Record) -> None:
    """Check that the views of the stream for `chunks` chunks hold every row it reads and writes."""
    rows = chunks * gemm.M
    if rows > MAX_DIM:
        raise record.error(f"{record.tag} {gemm.key} has {rows} rows, wanted at most {MAX_DIM}")
    for name, found, wanted in (
        ("a_elems", a_elems, (rows - 1) * gemm.lda + gemm.K),
        ("c_elems", c_elems, (rows - 1) * gemm.c_stride + gemm.n_out),
    ):
        if found < wanted:
            raise record.error(
                f"{record.tag} {gemm.key} {name} is {found}, wanted at least {wanted} for "
                f"{rows} rows"
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
        ctx=_ctx(record, manifest),
        insts=_insts(record),
        q_elems=_elems(record, "q_elems"),
        k_elems=_elems(record, "k_elems"),
        v_elems=_elems(record, "v_elems"),
        o_elems=_elems(record, "o_elems"),
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
    gemms = specs.gemms.values()
    named = [(g.kernel_id(n + 1), g.line) for g in gemms for n in range(len(g.insts))]
    for kernel_id, line in [*named, *((mha.kernel_id, mha.line) for mha in specs.all_mhas)]:
        if kernel_id in lines:
            raise BundleError(
                f"{MANIFEST}:{line}: a kernel named {kernel_id}, wanted another name than that of "
                f"line {lines[kernel_id]}; re-export the bundle."
            )
        lines[kernel_id] = line


def _ctx(record: Record, manifest: Manifest) -> str:
    ctx = record.get("ctx")
    if ctx not in manifest.xclbins:
        known = ", ".join(manifest.xclbins) or "none"
        raise record.error(f"{record.tag} ctx is {ctx!r}, wanted the key of an xclbin ({known})")
    return ctx


def _insts(record: Record) -> str:
    if insts := record.get("insts"):
        return insts
    raise record.error(f"{record.tag} insts is empty, wanted a path")


def _elems(record: Record, key: str) -> int:
    return record.get_int(key, minimum=1, maximum=MAX_ELEMS)


def _words(record: Record, key: str) -> tuple[int, ...]:
    if words := record.get_ints(key, minimum=0, maximum=MAX_WORD):
        return words
    raise record.error(f"{record.tag} {key} is empty, wanted word indices of the stream")
