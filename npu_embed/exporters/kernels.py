"""GEMM and MHA kernels as a bundle holds them: manifest records and the files they name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..records import FieldValue, Record, make_record
from ..specs import DEFAULT_MHA
from .geometry import CORE_ROWS, Epilogue, M
from .parts import Progress
from .streams import gemm_stream, mha_stream

GEMM_CTX, MHA_CTX = "gemm", "mha"
# Rows of the streams between whole chunks -> in how many equal chunks. A chunk takes multiples of
# CORE_ROWS * ROW_TILE = 16 rows: below 64 those are all there are, and 96 = 2 x 48 is all there is
# in two chunks. B goes through the array once a chunk, so that no more chunks than whole ones would
# take is worth it; and from 128 rows on, whole chunks compute at most a third in vain.
ROWS_BETWEEN = {16: 1, 32: 1, 48: 1, 96: 2}
TARGETS = {"npu2": 4, "npu1": 3}  # by name: the device generation in a stream's header


@dataclass(frozen=True, slots=True)
class Kernels:
    """Records in manifest order, and file contents by their path in the bundle."""

    records: tuple[Record, ...]
    files: dict[str, bytes]

    def joined(self, others: Kernels) -> Kernels:
        """These and then the others."""
        return Kernels((*self.records, *others.records), {**self.files, **others.files})


@dataclass(frozen=True, slots=True)
class Gemm:
    """One GEMM of a model; K and N are whole tiles, lda and c_stride in elements."""

    key: str
    K: int
    N: int
    lda: int
    c_stride: int
    epilogue: Epilogue = Epilogue.NONE
    bias: bool = True

    def kernels(self, max_chunks: int, dev_gen: int) -> Kernels:
        """Its streams for 1 to max_chunks chunks of M rows, and for the rows between them."""
        records: list[Record] = []
        files: dict[str, bytes] = {}
        told: dict[str, FieldValue] = {
            "epilogue": self.epilogue.name.lower(),
            "bias": int(self.bias),
        }
        for n in range(1, max_chunks + 1):
            views = self._views(f"{self.key}_x{n}", n, M, files, dev_gen)
            if n > 1:
                records.append(make_record("gemm_chunks", self.key, n, **views))
                continue
            insts, shape = views.pop("insts"), self._shape()
            records.append(
                make_record("gemm", self.key, ctx=GEMM_CTX, insts=insts, **shape, **views, **told)
            )
        for rows, n in ROWS_BETWEEN.items():
            if rows < max_chunks * M:
                views = self._views(f"{self.key}_r{rows}", n, rows // n, files, dev_gen)
                records.append(make_record("gemm_rows", self.key, rows, **views))
        return Kernels(tuple(records), files)

    @property
    def _width(self) -> int:
        """Columns of C that are results."""
        return self.N // 2 if self.epilogue is Epilogue.GEGLU_PAIR else self.N

    def _shape(self) -> dict[str, int]:
        shape = {"M": M, "K": self.K, "N": self.N, "lda": self.lda, "c_stride": self.c_stride}
        return shape if self._width == self.N else {**shape, "n_out": self._width}

    def _views(
        self, name: str, chunks: int, chunk_rows: int, files: dict[str, bytes], dev_gen: int
    ) -> dict[str, str | int]:
        """The fields of a stream's record: its file, which is added to files, and its views."""
        insts = f"kernels/{name}.insts.bin"
        stream = gemm_stream(
            chunks=chunks,
            k=self.K,
            n=self.N,
            lda=self.lda,
            c_stride=self.c_stride,
            epilogue=self.epilogue,
            bias=self.bias,
            dev_gen=dev_gen,
            rows_per_core=chunk_rows // CORE_ROWS,
        )
        files[insts] = stream.encode()
        last = chunks * chunk_rows - 1
        return {
            "insts": insts,
            "a_elems": last * self.lda + self.K,
            "c_elems": last * self.c_stride + self._width,
        }


@dataclass(frozen=True, slots=True)
class Mha:
    """Attention over Q, K, V side by side in rows of qkv_stride elements; O at column 0.

    q, k and v heads follow each other from column 0. A model with more than one head geometry tells
    them apart by name.
    """

    heads: int
    kv_heads: int
    head_dim: int
    qkv_stride: int
    o_stride: int
    name: str = DEFAULT_MHA

    @property
    def ctx(self) -> str:
        """The key of its xclbin, and the beginning of its kernels' names."""
        return MHA_CTX if self.name == DEFAULT_MHA else f"{MHA_CTX}.{self.name}"

    def kernels(self, buckets: tuple[int, ...], dev_gen: int) -> Kernels:
        """Its streams, one for each bucket of rows."""
        records: list[Record] = []
        files: dict[str, bytes] = {}
        q_width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        q_col, k_col, v_col = 0, q_width, q_width + kv_width
        named = {} if self.name == DEFAULT_MHA else {"name": self.name}
        for rows in buckets:
            insts = f"kernels/{self.ctx}_{rows}.insts.bin"
            stream, kv_words, win_words = mha_stream(
                rows=rows,
                heads=self.heads,
                kv_heads=self.kv_heads,
                head_dim=self.head_dim,
                q_stride=self.qkv_stride,
                k_stride=self.qkv_stride,
                v_stride=self.qkv_stride,
                o_stride=self.o_stride,
                q_col=q_col,
                k_col=k_col,
                v_col=v_col,
                o_col=0,
                dev_gen=dev_gen,
            )
            files[insts] = stream.encode()
            before = (rows - 1) * self.qkv_stride
            records.append(
                make_record(
                    "mha",
                    rows,
                    **named,
                    ctx=self.ctx,
                    insts=insts,
                    q_elems=before + q_col + q_width,
                    k_elems=before + k_col + kv_width,
                    v_elems=before + v_col + kv_width,
                    o_elems=(rows - 1) * self.o_stride + q_width,
                    kv_words=kv_words,
                    win_words=win_words,
                    heads=self.heads,
                    kv_heads=self.kv_heads,
                    head_dim=self.head_dim,
                )
            )
        return Kernels(tuple(records), files)


def all_kernels(
    gemms: Sequence[Gemm],
    mhas: Sequence[Mha],
    *,
    max_chunks: int,
    buckets: tuple[int, ...],
    target: str,
    progress: Progress,
) -> Kernels:
    """The kernels of a model, GEMMs first."""
    dev_gen = TARGETS[target]
    records: list[Record] = []
    files: dict[str, bytes] = {}
    total = len(gemms) + len(mhas)
    every: list[Gemm | Mha] = [*gemms, *mhas]
    for done, kernel in enumerate(every):
        progress("kernels", done, total)
        made = (
            kernel.kernels(max_chunks, dev_gen)
            if isinstance(kernel, Gemm)
            else kernel.kernels(buckets, dev_gen)
        )
        records.extend(made.records)
        files.update(made.files)
    progress("kernels", total, total)
    return Kernels(tuple(records), files)
