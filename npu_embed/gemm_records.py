"""GEMM specs: the `gemm`, `gemm_chunks` and `gemm_rows` records of a manifest, checked.

A GEMM has a stream for each number of whole chunks of M rows, and may have some for rows between
them. The records are specified in docs/bundle-format.md.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace
from operator import attrgetter

from .kernel_fields import MAX_DIM, ctx_of, elems_of, insts_of
from .manifest import Manifest, Record

TAGS_OF_STREAMS = ("gemm_chunks", "gemm_rows")

_rows = attrgetter("rows")


@dataclass(frozen=True, slots=True)
class GemmStream:
    """An instruction stream of a GEMM that computes exactly `rows` rows.

    kernel_id is the kernel's name: `qkv` for one chunk, `qkv_x3` for three, `qkv_r16` for 16 rows.
    insts is a path relative to the bundle; a_elems and c_elems are the lengths of the views of A
    and C, in bf16 elements.
    """

    kernel_id: str
    rows: int
    insts: str
    a_elems: int
    c_elems: int
    line: int


@dataclass(frozen=True, slots=True)
class GemmSpec:
    """C[rows, N] = A[rows, K] B[K, N], by one of several streams, their rows ascending.

    ctx is the key of the xclbin. Rows of A begin lda elements apart, rows of C c_stride. The first
    n_out columns of C are results: fewer than N where the epilogue pairs columns of B.
    """

    key: str
    ctx: str
    streams: tuple[GemmStream, ...]
    M: int
    K: int
    N: int
    lda: int
    c_stride: int
    n_out: int
    line: int

    @property
    def max_rows(self) -> int:
        """The rows of the longest stream, which is one of whole chunks."""
        return self.streams[-1].rows

    def stream_for(self, rows: int) -> GemmStream:
        """The shortest stream that holds `rows` rows.

        Raises:
            ValueError: rows is less than 1 or more than max_rows.
        """
        if not 1 <= rows <= self.max_rows:
            raise ValueError(f"gemm {self.key}: {rows} rows, wanted 1 to {self.max_rows}.")
        return self.streams[bisect_left(self.streams, rows, key=_rows)]

    def stream_of(self, insts: str) -> GemmStream:
        """The stream in the file `insts`; each has a file of its own."""
        return next(stream for stream in self.streams if stream.insts == insts)


@dataclass(slots=True)
class GemmRecords:
    """A gemm while the records after it are read: its streams by file."""

    first: GemmSpec
    streams: dict[str, GemmStream]
    chunks: int = 1
    other_rows: int = 0  # of the last gemm_rows record

    @classmethod
    def of(cls, record: Record, manifest: Manifest) -> "GemmRecords":
        """Those of a gemm record alone.

        Raises:
            BundleError: a field is missing, out of its bounds, or contradicts another.
        """
        first = _gemm(record, manifest)
        return cls(first, {stream.insts: stream for stream in first.streams})

    def add(self, record: Record) -> None:
        """Add the stream of a gemm_chunks or gemm_rows record of this gemm.

        Raises:
            BundleError: the record is wrong, or in the wrong place.
        """
        if record.tag == "gemm_chunks":
            self._add_chunks(record)
        else:
            self._add_rows(record)

    def _add_chunks(self, record: Record) -> None:
        key, last = self.first.key, self.chunks
        chunks = record.field_int(1, "KEY N", minimum=1, maximum=MAX_DIM)
        if self.other_rows:
            # Who does not know gemm_rows records would not find it right after its gemm either.
            raise record.error(f"gemm_chunks {key} {chunks}, wanted it before gemm_rows {key}")
        if chunks != last + 1:
            raise record.error(
                f"gemm_chunks {key} {chunks} follows chunk {last}, wanted chunk {last + 1}"
            )
        self._add_stream(record, f"{key}_x{chunks}", chunks, chunks * self.first.M)
        self.chunks = chunks

    def _add_rows(self, record: Record) -> None:
        key, M = self.first.key, self.first.M
        rows = record.field_int(1, "KEY ROWS", minimum=1, maximum=MAX_DIM)
        if rows % M == 0:
            raise record.error(
                f"gemm_rows {key} {rows} is {rows // M} chunks of {M} rows, wanted rows between "
                "chunks"
            )
        if rows > self.chunks * M:
            raise record.error(
                f"gemm_rows {key} {rows}, wanted fewer rows than the {self.chunks * M} of all its "
                "chunks"
            )
        if rows <= self.other_rows:
            raise record.error(
                f"gemm_rows {key} {rows} follows {self.other_rows} rows, wanted more than those"
            )
        self._add_stream(record, f"{key}_r{rows}", rows, rows)
        self.other_rows = rows

    def _add_stream(self, record: Record, kernel_id: str, number: int, rows: int) -> None:
        called = f"{record.tag} {self.first.key} {number}"
        if record.has("ctx") and record.get("ctx") != self.first.ctx:
            raise record.error(
                f"{called} ctx is {record.get('ctx')}, wanted {self.first.ctx} as its gemm has"
            )
        insts = insts_of(record)
        if insts in self.streams:
            raise record.error(
                f"{called} insts is {insts}, which is of {self.streams[insts].rows} rows, wanted "
                "a stream of its own"
            )
        self.streams[insts] = _stream(self.first, kernel_id, rows, record)

    def spec(self) -> GemmSpec:
        """The spec with all streams."""
        return replace(self.first, streams=tuple(sorted(self.streams.values(), key=_rows)))


def _gemm(record: Record, manifest: Manifest) -> GemmSpec:
    """The spec of a gemm record alone, with the stream of one chunk."""
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
    ctx = ctx_of(record, manifest)
    bare = GemmSpec(key=key, ctx=ctx, streams=(), **dim, n_out=n_out, line=record.line)
    return replace(bare, streams=(_stream(bare, key, bare.M, record),))


def _stream(gemm: GemmSpec, kernel_id: str, rows: int, record: Record) -> GemmStream:
    """A record's stream for `rows` rows, whose views must hold every row it reads and writes."""
    if rows > MAX_DIM:
        raise record.error(f"{record.tag} {gemm.key} has {rows} rows, wanted at most {MAX_DIM}")
    stream = GemmStream(
        kernel_id,
        rows,
        insts_of(record),
        elems_of(record, "a_elems"),
        elems_of(record, "c_elems"),
        record.line,
    )
    for name, found, wanted in (
        ("a_elems", stream.a_elems, (rows - 1) * gemm.lda + gemm.K),
        ("c_elems", stream.c_elems, (rows - 1) * gemm.c_stride + gemm.n_out),
    ):
        if found < wanted:
            raise record.error(
                f"{record.tag} {gemm.key} {name} is {found}, wanted at least {wanted} for "
                f"{rows} rows"
            )
    return stream
