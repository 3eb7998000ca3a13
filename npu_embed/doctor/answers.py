"""A GEMM and an attention whose results are known: computed here, in float64, from the definition.

Numbers are chosen so that bfloat16 holds every operand exactly. A GEMM's are small integers: its
float32 sums are exact in any order, and a result up to 256 is exact in bfloat16 too. Attention
rounds four times (scores, the power of two, the probability, the result), each time by at most
2^-8 of what the values it weighs add up to; one key too many costs some row a fiftieth of that sum
or more.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..bundle import Bundle
from ..device import Session
from ..exporters.pack import pack_gemm
from ..manifest import Record
from ..npu import Npu
from ..rows import Rows
from ..specs import GemmSpec, MhaSpec

F64 = NDArray[np.float64]

BF16_ROUNDING = 2.0**-8  # relative: 8 significant bits
EXACT = 2**8  # every integer up to it is a bfloat16
MHA_ROUNDINGS = 4
WINDOW = 3
ELSEWHERE = 100.0  # in rows that must not take part


class NoAnswer(Exception):
    """What a bundle's kernels should give is not known; the message says why."""


@dataclass(frozen=True, slots=True)
class Answer:
    """How far the results were from the known ones: the worst one's error and what it may be."""

    kernel: str
    numbers: int
    wrong: int
    error: float
    allowed: float

    @classmethod
    def of(cls, kernel: str, found: F64, wanted: F64, allowed: F64) -> Answer:
        """The comparison of every number; a NaN is wrong."""
        errors = np.abs(found - wanted)
        good = errors <= allowed
        excess = np.where(np.isnan(errors), np.inf, errors - allowed)
        worst = np.unravel_index(int(np.argmax(excess)), excess.shape)
        return cls(
            kernel, found.size, int(np.sum(~good)), float(errors[worst]), float(allowed[worst])
        )


def gemm_answer(session: Session, bundle: Bundle) -> Answer:
    """A GEMM of the bundle, with weights of our own, compared.

    Raises:
        NoAnswer: no record says what its GEMM computes and how its weights are packed.
        BundleError, NoFreeContext, RunFailed, DeviceError: from the run.
    """
    spec, bias = _plain_gemm(bundle)
    rng = np.random.default_rng(7)
    stream = spec.streams[0]
    rows = max(stream.rows - 1, 1)
    a = rng.integers(-3, 4, (rows, spec.K)).astype(np.float32)
    b = rng.integers(-1, 2, (spec.K, spec.N)).astype(np.float32)
    added = rng.integers(-8, 9, spec.N).astype(np.float32)
    packed = pack_gemm(b, added if bias else None)
    if (wanted_bytes := bundle.packed_bytes(spec)) not in (None, packed.nbytes):
        raise NoAnswer(
            f"gemm {spec.key} reads {wanted_bytes} bytes of weights, {packed.nbytes} as "
            "docs/array-programs.md packs them"
        )
    npu = Npu(session, bundle)
    try:
        operand = Rows(session, stream.rows, spec.lda)
        result = Rows(session, stream.rows, spec.c_stride)
        weights = session.buffer(packed.nbytes)
        weights.host[:] = packed
        weights.to_device(0, packed.nbytes)
        operand.put(np.zeros((stream.rows, spec.lda), np.float32))
        operand.put(a)
        npu.run_gemm(spec.key, operand, 0, weights, result, rows)
        found = result.get(rows, spec.N).astype(np.float64)
    finally:
        npu.close()
    wanted = a.astype(np.float64) @ b.astype(np.float64) + (added if bias else 0.0)
    allowed = np.where(np.abs(wanted) <= EXACT, 0.0, BF16_ROUNDING * np.abs(wanted))
    return Answer.of(stream.kernel_id, found, wanted, allowed)


def _plain_gemm(bundle: Bundle) -> tuple[GemmSpec, bool]:
    """The smallest GEMM that does nothing to its sum but add a bias, and whether it adds one."""
    plain = []
    for spec in bundle.specs.all_gemms:
        record = _record(bundle, spec.line)
        if record.has("epilogue") and record.get("epilogue") == "none" and record.has("bias"):
            plain.append((spec.K * spec.N, spec.key, spec, record.get("bias") == "1"))
    if not plain:
        raise NoAnswer("no gemm record says `epilogue=none` and whether there is a bias")
    if not bundle.has_array_programs:
        raise NoAnswer("how a compiled kernel's weights are packed is its maker's choice")
    _, _, spec, bias = min(plain)
    return spec, bias


def mha_answer(session: Session, bundle: Bundle) -> Answer:
    """An attention of the bundle, with keys and then a window that take no part, compared.

    Raises:
        NoAnswer: no record says what heads an attention has.
        BundleError, NoFreeContext, RunFailed, DeviceError: from the run.
    """
    name, spec, heads = _known_heads(bundle)
    kv = spec.rows - 3
    rng = np.random.default_rng(8)
    qkv = rng.integers(-8, 9, (spec.rows, heads.stride)).astype(np.float32) / np.float32(8)
    qkv[kv:] = ELSEWHERE
    npu = Npu(session, bundle)
    answers = []
    try:
        rows = Rows(session, spec.rows, heads.stride)
        result = Rows(session, spec.rows, heads.o_stride)
        rows.put(qkv)
        for window in (None, WINDOW):
            npu.run_mha(rows, result, kv, window, name=name)
            found = result.get(kv, heads.q_width).astype(np.float64)
            wanted, weighed = heads.attention(qkv[:kv].astype(np.float64), window)
            allowed = MHA_ROUNDINGS * BF16_ROUNDING * weighed
            answers.append(Answer.of(spec.kernel_id, found, wanted, allowed))
    finally:
        npu.close()
    return max(answers, key=lambda answer: (answer.wrong, answer.error - answer.allowed))


@dataclass(frozen=True, slots=True)
class Heads:
    """Where a row of elements holds its heads: q from column 0, then k_col and v_col."""

    heads: int
    kv_heads: int
    head_dim: int
    stride: int
    k_col: int
    v_col: int
    o_stride: int

    @property
    def q_width(self) -> int:
        """Elements of all query heads."""
        return self.heads * self.head_dim

    def attention(self, rows: F64, window: int | None) -> tuple[F64, F64]:
        """softmax2(q k^T) v of every head, and the same of |v|; [rows, q_width] each."""
        count, d = len(rows), self.head_dim
        apart = np.abs(np.arange(count)[:, None] - np.arange(count)[None, :])
        seen = apart <= (count if window is None else window)
        out, weighed = np.empty((2, count, self.q_width))
        for head in range(self.heads):
            shared = head // (self.heads // self.kv_heads)
            q = rows[:, head * d : (head + 1) * d]
            k = rows[:, self.k_col + shared * d : self.k_col + (shared + 1) * d]
            v = rows[:, self.v_col + shared * d : self.v_col + (shared + 1) * d]
            scores = np.where(seen, q @ k.T, -np.inf)
            p = np.exp2(scores - scores.max(axis=1, keepdims=True))
            p /= p.sum(axis=1, keepdims=True)
            out[:, head * d : (head + 1) * d] = p @ v
            weighed[:, head * d : (head + 1) * d] = p @ np.abs(v)
        return out, weighed


def _known_heads(bundle: Bundle) -> tuple[str, MhaSpec, Heads]:
    """The shortest attention whose record tells its heads: its name, and how its views hold them.

    The name is the one its buckets are asked for by.
    """
    every = [(name, spec) for name, specs in bundle.specs.buckets.items() for spec in specs]
    for name, spec in sorted(every, key=lambda named: (named[1].rows, named[0])):
        record = _record(bundle, spec.line)
        if spec.rows < 2 * WINDOW or not all(
            record.has(key) for key in ("heads", "kv_heads", "head_dim")
        ):
            continue
        heads, kv_heads, head_dim = (
            record.get_int(key, minimum=1, maximum=1 << 16)
            for key in ("heads", "kv_heads", "head_dim")
        )
        # A view ends with the last row's last element of what it is a view of.
        before, kv_width = spec.rows - 1, kv_heads * head_dim
        stride, rest = divmod(spec.q_elems - heads * head_dim, before)
        o_stride, o_rest = divmod(spec.o_elems - heads * head_dim, before)
        k_col, v_col = (e - before * stride - kv_width for e in (spec.k_elems, spec.v_elems))
        ends = max(k_col, v_col) + kv_width
        if rest or o_rest or min(k_col, v_col) < heads * head_dim or ends > stride:
            continue
        return name, spec, Heads(heads, kv_heads, head_dim, stride, k_col, v_col, o_stride)
    raise NoAnswer("no mha record tells its heads (`heads=`, `kv_heads=`, `head_dim=`)")


def _record(bundle: Bundle, line: int) -> Record:
    return next(record for record in bundle.manifest.records if record.line == line)
