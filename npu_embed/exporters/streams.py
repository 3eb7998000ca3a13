"""Instruction streams of the two array programs, in the TXN 0.1 form.

Source: docs/array-programs.md for run-time words and stream orders. Every stream writes all its
run-time words before it pushes anything: another context may have run in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..emulator import txn
from .descriptors import MAX_SIZE, MAX_STRIDE, Channel, ShimBd, Transfer, wait_for_results
from .geometry import (
    COLUMNS,
    CORE_ROWS,
    DEVICE_COLUMNS,
    FIRST_CORE_ROW,
    K_TILE,
    N_TILE,
    NO_WINDOW,
    ROW_TILE,
    ROWS_PER_CORE,
    RTP_OFFSET,
    Epilogue,
)
from .pack import block_bytes

# Kernel arguments, counted from bo0.
_A, _B, _C = 0, 1, 2
_Q, _K, _V, _O = 0, 1, 2, 3

_MHA_KV_WORD, _MHA_WINDOW_WORD = 1, 2


def _even(where: str, **elems: int) -> None:
    for name, value in elems.items():
        if value % 2:
            raise ValueError(f"{where}: {name} is {value} elements, wanted an even number")


def _multiple(where: str, name: str, value: int, of: int) -> None:
    if value < of or value % of:
        raise ValueError(f"{where}: {name} is {value}, wanted a multiple of {of}")


def _rtp(col: int, row: int, word: int) -> int:
    return txn.address(col, FIRST_CORE_ROW + row, RTP_OFFSET + 4 * word)


def _write_rtps(col: int, words: Sequence[int]) -> Iterator[txn.Op]:
    for row in range(CORE_ROWS):
        for word, value in enumerate(words):
            yield txn.write(_rtp(col, row, word), value)


def _assemble(ops: Sequence[txn.Op], dev_gen: int) -> txn.Stream:
    if dev_gen not in DEVICE_COLUMNS:
        known = ", ".join(map(str, DEVICE_COLUMNS))
        raise ValueError(f"stream: dev_gen is {dev_gen}, wanted one of {known}")
    return txn.assemble(ops, dev_gen=dev_gen, num_cols=DEVICE_COLUMNS[dev_gen])


def active_columns(n_blocks: int) -> int:
    """The largest divisor of n_blocks that is a number of columns: all active ones work alike."""
    return max(c for c in range(1, COLUMNS + 1) if n_blocks % c == 0)


def _chunk_stride(chunks: int, chunk_rows: int, row_elems: int) -> int:
    """Words from one chunk to the next; a single chunk has no next, however wide its rows."""
    return chunk_rows * row_elems // 2 if chunks > 1 else 1


def _c_bd(width: int, c_stride: int, chunks: int, chunk_rows: int) -> ShimBd:
    """A chunk's rows of `width` elements at c_stride; a wide row is cut into parts that fit d0."""
    row_words, stride = width // 2, c_stride // 2
    parts = next(
        p for p in range(1, row_words + 1) if row_words % p == 0 and row_words // p <= MAX_SIZE
    )
    iteration_stride = _chunk_stride(chunks, chunk_rows, c_stride)
    iteration = {"iterations": chunks, "iteration_stride": iteration_stride}
    length = chunk_rows * row_words
    if parts == 1:
        return ShimBd(length, d0_size=row_words, d1_size=chunk_rows, d1_stride=stride, **iteration)
    part_words = row_words // parts
    return ShimBd(
        length,
        d0_size=part_words,
        d1_size=parts,
        d1_stride=part_words,
        d2_stride=stride,
        **iteration,
    )


def gemm_stream(
    chunks: int,
    k: int,
    n: int,
    lda: int,
    c_stride: int,
    epilogue: int,
    bias: bool,
    dev_gen: int,
    rows_per_core: int = ROWS_PER_CORE,
) -> txn.Stream:
    """C = epilogue(A B + bias) over chunks * 4 * rows_per_core rows; bo0 = A, bo1 = B, bo2 = C.

    k and n are whole tiles (64). A has lda elements a row, C has c_stride; a GeGLU pair writes
    n / 2 columns, everything else n. B is packed.

    Raises:
        ValueError: a size is not what the array or a descriptor field takes.
    """
    where = "gemm stream"
    _multiple(where, "k", k, K_TILE)
    _multiple(where, "n", n, N_TILE)
    _even(where, lda=lda, c_stride=c_stride)
    _multiple(where, "rows_per_core", rows_per_core, ROW_TILE)
    if rows_per_core > ROWS_PER_CORE:
        raise ValueError(
            f"{where}: rows_per_core is {rows_per_core}, wanted at most {ROWS_PER_CORE}"
        )
    chunk_rows = CORE_ROWS * rows_per_core
    epilogue = Epilogue(epilogue)
    k_blocks, n_blocks = k // K_TILE, n // N_TILE
    columns = active_columns(n_blocks)
    blocks = n_blocks // columns
    n_out = N_TILE // 2 if epilogue is Epilogue.GEGLU_PAIR else N_TILE
    width = n_out * blocks  # of one column's share of C
    if lda < k or c_stride < width * columns:
        raise ValueError(
            f"{where}: lda {lda} and c_stride {c_stride}, wanted at least {k} and {width * columns}"
        )

    a_bd = ShimBd(
        rows_per_core * k // 2,
        d0_size=K_TILE // 2,
        d1_size=rows_per_core,
        d1_stride=lda // 2,
        d2_stride=K_TILE // 2,
        iterations=chunks,
        iteration_stride=_chunk_stride(chunks, chunk_rows, lda),
    )
    column_bytes = blocks * block_bytes(k, bias)
    b_bd = ShimBd(column_bytes // 4)
    c_bd = _c_bd(width, c_stride, chunks, chunk_rows)

    ops: list[txn.Op] = []
    for col in range(COLUMNS):
        active = blocks if col < columns else 0
        words = (chunks, k_blocks, active, int(epilogue), int(bias), rows_per_core)
        ops.extend(_write_rtps(col, words))
    # Results first: a channel that waits for data costs nothing, data without a taker stalls.
    for col in range(columns):
        ops.extend(Transfer(col, Channel.S2MM0, 2, c_bd, _C, col * width * 2, chunks).ops())
    for col in range(COLUMNS):  # column r feeds core row r of every column, also where it is idle
        row_bytes = col * rows_per_core * lda * 2
        ops.extend(Transfer(col, Channel.MM2S0, 0, a_bd, _A, row_bytes, chunks).ops())
    for col in range(columns):
        ops.extend(Transfer(col, Channel.MM2S1, 1, b_bd, _B, col * column_bytes, chunks).ops())
    ops.extend(wait_for_results(col) for col in range(columns))
    return _assemble(ops, dev_gen)


def head_shares(heads: int) -> tuple[tuple[int, int], ...]:
    """(first head, heads) of each column: contiguous, as even as possible, (0, 0) = idle."""
    base, extra = divmod(heads, COLUMNS)
    shares, first = [], 0
    for col in range(COLUMNS):
        count = base + (col < extra)
        shares.append((first if count else 0, count))
        first += count
    return tuple(shares)


def _heads_bd(rows: int, heads: int, head_dim: int, stride: int) -> tuple[ShimBd, int]:
    """[head][row][d] of heads side by side in rows of `stride` elements, and how often to push it.

    More rows than d1 can count take two dimensions, and each head is then a push of its own.
    """
    head_words, row_words = head_dim // 2, stride // 2
    if rows <= MAX_SIZE:
        bd = ShimBd(
            heads * rows * head_words,
            d0_size=head_words,
            d1_size=rows,
            d1_stride=row_words,
            d2_stride=head_words,
        )
        return bd, 1
    # Where even a single row is too long, the descriptor's own check says so.
    part = next(
        (
            rows // n
            for n in range(2, rows)
            if rows % n == 0 and rows // n <= MAX_SIZE and rows // n * row_words <= MAX_STRIDE
        ),
        1,
    )
    bd = ShimBd(
        rows * head_words,
        d0_size=head_words,
        d1_size=part,
        d1_stride=row_words,
        d2_stride=part * row_words,
        iterations=heads,
        iteration_stride=head_words,
    )
    return bd, heads


def mha_stream(
    rows: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    q_stride: int,
    k_stride: int,
    v_stride: int,
    o_stride: int,
    q_col: int,
    k_col: int,
    v_col: int,
    o_col: int,
    dev_gen: int,
) -> tuple[txn.Stream, tuple[int, ...], tuple[int, ...]]:
    """O = softmax2(Q K^T) V over a bucket of `rows` rows -> (stream, kv words, window words).

    bo0..bo3 = Q, K, V, O. Strides are elements a row, *_col the first element of head 0 in row 0;
    heads stand side by side. The words are the stream's word indices to patch, one for each working
    core: kv begins as rows, the window as none (0xFFFFFFFF).

    Raises:
        ValueError: a size is not what the array or a descriptor field takes.
    """
    where = "mha stream"
    _multiple(where, "rows", rows, CORE_ROWS)
    _multiple(where, "heads", heads, kv_heads)
    _multiple(where, "head_dim", head_dim, 2)
    _even(where, q_stride=q_stride, k_stride=k_stride, v_stride=v_stride, o_stride=o_stride)
    _even(where, q_col=q_col, k_col=k_col, v_col=v_col, o_col=o_col)
    group = heads // kv_heads

    def move(
        col: int, channel: Channel, arg: int, first: int, count: int, stride: int, start: int
    ) -> Iterator[txn.Op]:
        bd, repeat = _heads_bd(rows, count, head_dim, stride)
        return Transfer(col, channel, arg, bd, arg, (start + first * head_dim) * 2, repeat).ops()

    shares = head_shares(heads)
    active = [(col, first, count) for col, (first, count) in enumerate(shares) if count]
    ops: list[txn.Op] = []
    for col, (first, count) in enumerate(shares):
        ops.extend(_write_rtps(col, (rows, rows, NO_WINDOW, first, count)))
    for col, first, count in active:
        ops.extend(move(col, Channel.S2MM0, _O, first, count, o_stride, o_col))
    for col, first, count in active:
        kv_first = first // group
        kv_count = (first + count - 1) // group - kv_first + 1
        ops.extend(move(col, Channel.MM2S0, _Q, first, count, q_stride, q_col))
        ops.extend(move(col, Channel.MM2S1, _K, kv_first, kv_count, k_stride, k_col))
        ops.extend(move(col, Channel.MM2S1, _V, kv_first, kv_count, v_stride, v_col))
    ops.extend(wait_for_results(col) for col, _, _ in active)

    stream = _assemble(ops, dev_gen)
    cores = [(col, row) for col, _, _ in active for row in range(CORE_ROWS)]
    value_words = {op.address: op.value_word for op in stream.ops if isinstance(op, txn.Write)}
    kv_words = tuple(value_words[_rtp(*core, _MHA_KV_WORD)] for core in cores)
    window_words = tuple(value_words[_rtp(*core, _MHA_WINDOW_WORD)] for core in cores)
    return stream, kv_words, window_words
