"""BERT: embeddings, post-norm encoder layers, pooling.

A layer on the device: qkv GEMM -> MHA reads its C in place -> o GEMM reads the MHA's output in
place; up GEMM with the activation -> down GEMM reads its C in place. The host adds residuals and
norms in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..bf16 import F32
from ..bundle import Bundle
from ..device import Buffer, Session
from ..errors import BundleError
from ..hostops import POOLINGS, layer_norm, row_numbers, unit_rows
from ..npu import Npu
from ..packing import Pack
from ..rows import Rows
from ..trace import Timing
from .forward import Tap

GEMMS = ("qkv", "o", "up", "down")
STAGES = ("embeddings", "layers", "pooling")
OPTIONAL_STAGES = ("normalize",)
MAX_BUFFER_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class Norm:
    """Weight and bias of a LayerNorm, float32 [hidden_size]."""

    weight: F32
    bias: F32


@dataclass(frozen=True, slots=True)
class Layer:
    """One encoder layer's weights: packed B on the device by GEMM key, norms on the host."""

    packed: dict[str, Buffer]
    attention_norm: Norm
    output_norm: Norm


class Bert:
    """A BERT encoder with pooling, on a device."""

    def __init__(self, session: Session, bundle: Bundle, max_rows: int) -> None:
        manifest = bundle.manifest
        self.max_rows = max_rows
        self.hidden_size = manifest.param_int("hidden_size", minimum=1, maximum=1 << 16)
        self.num_hidden_layers = manifest.param_int("num_hidden_layers", minimum=1, maximum=1024)
        self.vocab_size = manifest.param_int("vocab_size", minimum=1, maximum=1 << 24)
        self.layer_norm_eps = manifest.param_float("layer_norm_eps")
        self.dim = self.hidden_size
        pooling = manifest.param_str("pooling")
        if pooling not in POOLINGS:
            raise BundleError(
                f"manifest.txt: param pooling {pooling}, wanted {', '.join(POOLINGS)}; "
                "re-export the bundle."
            )
        self.pool = POOLINGS[pooling]
        self.normalize = manifest.param_flag("normalize")
        _check_stages(bundle, self.normalize)
        self._check_gemms(bundle)

        d = self.hidden_size
        tensors = bundle.tensors
        positions = manifest.param_int("max_position_embeddings", minimum=1, maximum=1 << 20)
        types = manifest.param_int("type_vocab_size", minimum=1, maximum=1 << 16)
        if bundle.max_tokens > positions:
            raise BundleError(
                f"manifest.txt: param max_tokens {bundle.max_tokens}, wanted at most "
                f"max_position_embeddings {positions}; re-export the bundle."
            )
        self._words = tensors.f32("embeddings.word_embeddings.weight", (self.vocab_size, d))
        # Every token is of type 0, so its row is the same for all: added to the positions once.
        position = tensors.f32("embeddings.position_embeddings.weight", (positions, d))
        token_type = tensors.f32("embeddings.token_type_embeddings.weight", (types, d))
        self._positions = position[: bundle.max_tokens]
        self._token_type = token_type[0]
        self._embedding_norm = self._norm(bundle, "embeddings.LayerNorm")

        self.npu = Npu(session, bundle)
        gemms = bundle.specs.gemms
        slack = bundle.specs.mhas[-1].rows  # a bucket writes all its rows, past the last text too
        rows = _padded_rows(bundle, max_rows)
        self._x = Rows(session, rows, gemms["qkv"].lda)
        self._qkv = Rows(session, rows + slack, gemms["qkv"].c_stride)
        self._context = Rows(session, rows + slack, gemms["o"].lda)
        self._out = Rows(session, rows, gemms["o"].c_stride)
        self._inner = Rows(session, rows, gemms["up"].c_stride)
        self._layers = [self._layer(session, bundle, i) for i in range(self.num_hidden_layers)]

    def _check_gemms(self, bundle: Bundle) -> None:
        """The four GEMMs must fit each other's buffers, as the forward chains them."""
        gemms = bundle.specs.gemms
        missing = [key for key in GEMMS if key not in gemms]
        if missing or not bundle.specs.mhas:
            raise BundleError(
                f"manifest.txt: no {' '.join(missing) or 'mha'} record, a BERT needs "
                f"gemm {', '.join(GEMMS)} and mha; re-export the bundle."
            )
        qkv, o, up, down = (gemms[key] for key in GEMMS)
        d = self.hidden_size
        _check_views(bundle)
        wanted = {
            "qkv N": (qkv.N, 3 * d, None),
            "up lda": (up.lda, qkv.lda, qkv.lda),
            "down lda": (down.lda, up.c_stride, up.c_stride),
            "down c_stride": (down.c_stride, o.c_stride, o.c_stride),
            "o N": (o.N, d, None),
            "qkv lda": (qkv.lda, d, None),
        }
        for name, (found, lowest, exactly) in wanted.items():
            if found < lowest or (exactly is not None and found != exactly):
                relation = "at least" if exactly is None else "exactly"
                raise BundleError(
                    f"manifest.txt: gemm {name} is {found}, wanted {relation} {lowest}; "
                    "re-export the bundle."
                )
        longest = bundle.specs.mhas[-1].rows
        if longest < bundle.max_tokens:
            raise BundleError(
                f"manifest.txt: longest mha bucket has {longest} rows, wanted max_tokens "
                f"{bundle.max_tokens}; re-export the bundle."
            )

    def _norm(self, bundle: Bundle, name: str) -> Norm:
        shape = (self.hidden_size,)
        tensors = bundle.tensors
        return Norm(tensors.f32(f"{name}.weight", shape), tensors.f32(f"{name}.bias", shape))

    def _layer(self, session: Session, bundle: Bundle, index: int) -> Layer:
        name = f"encoder.layer.{index}"
        packed = {}
        for key in GEMMS:
            data = bundle.tensors.raw(f"{name}.{key}.packed")
            buffer = packed[key] = session.buffer(data.nbytes)
            buffer.host[:] = data
            buffer.to_device(0, data.nbytes)
        return Layer(
            packed,
            self._norm(bundle, f"{name}.attention.output.LayerNorm"),
            self._norm(bundle, f"{name}.output.LayerNorm"),
        )

    def forward(
        self,
        ids: Sequence[NDArray[np.int32]],
        pack: Pack,
        timing: Timing,
        tap: Tap | None = None,
    ) -> F32:
        """The vectors of a pack's texts, float32 [texts, hidden_size]; see Forward.forward."""
        npu, rows, d, eps = self.npu, pack.rows, self.hidden_size, self.layer_norm_eps
        with timing.stage("embeddings"):
            flat = np.concatenate(ids)
            if flat.max() >= self.vocab_size:
                raise BundleError(
                    f"tokenizer.json: token id {flat.max()}, wanted less than vocab_size "
                    f"{self.vocab_size}; re-export the bundle."
                )
            x: F32 = self._words[flat]
            x += self._token_type
            x += self._positions[row_numbers(pack.starts, pack.lengths)]
            layer_norm(x, self._embedding_norm.weight, self._embedding_norm.bias, eps)
        if tap is not None:
            tap("embeddings", x)
        for index, layer in enumerate(self._layers):
            with timing.stage("host"):
                self._x.put(x)
            with timing.stage("gemm"):
                npu.run_gemm("qkv", self._x, 0, layer.packed["qkv"], self._qkv, rows)
            with timing.stage("mha"):
                # Ascending: each run's rows past its text are overwritten by the next text's run.
                for start, length in zip(pack.starts, pack.lengths, strict=True):
                    npu.run_mha(self._qkv, self._context, length, row=start)
            with timing.stage("gemm"):
                npu.run_gemm("o", self._context, 0, layer.packed["o"], self._out, rows)
            with timing.stage("host"):
                y = self._out.get(rows, d)
                norm = layer.attention_norm
                x = layer_norm(y, norm.weight, norm.bias, eps, residual=x)
                self._x.put(x)
            with timing.stage("gemm"):
                npu.run_gemm("up", self._x, 0, layer.packed["up"], self._inner, rows)
                npu.run_gemm("down", self._inner, 0, layer.packed["down"], self._out, rows)
            with timing.stage("host"):
                y = self._out.get(rows, d)
                norm = layer.output_norm
                x = layer_norm(y, norm.weight, norm.bias, eps, residual=x)
            if tap is not None:
                tap(f"layer {index}", x)
        with timing.stage("pooling"):
            pooled = self.pool(x, pack.starts, pack.lengths)
            return unit_rows(pooled) if self.normalize else pooled

    def close(self) -> None:
        """Release kernels and contexts."""
        self.npu.close()


def _padded_rows(bundle: Bundle, rows: int) -> int:
    """Rows that hold `rows` rows in whole chunks of each GEMM."""
    return max(bundle.specs.gemms[key].M * -(-rows // bundle.specs.gemms[key].M) for key in GEMMS)


def _check_views(bundle: Bundle) -> None:
    """No kernel's view may be longer than its rows and the one row more that a buffer has."""
    gemms = bundle.specs.gemms
    longest = [
        (g.line, f"gemm {key} {name}", elems, (n * g.M + 1) * stride)
        for key, g in ((key, gemms[key]) for key in GEMMS)
        for name, views, stride in (
            ("a_elems", g.a_elems, g.lda),
            ("c_elems", g.c_elems, g.c_stride),
        )
        for n, elems in enumerate(views, 1)
    ]
    for mha in bundle.specs.mhas:
        qkv, o = ((mha.rows + 1) * s for s in (gemms["qkv"].c_stride, gemms["o"].lda))
        longest += [
            (mha.line, f"mha {mha.rows} q_elems", mha.q_elems, qkv),
            (mha.line, f"mha {mha.rows} k_elems", mha.k_elems, qkv),
            (mha.line, f"mha {mha.rows} v_elems", mha.v_elems, qkv),
            (mha.line, f"mha {mha.rows} o_elems", mha.o_elems, o),
        ]
    for line, name, found, wanted in longest:
        if found > wanted:
            raise BundleError(
                f"manifest.txt:{line}: {name} is {found}, wanted at most {wanted}, what the rows "
                "hold; re-export the bundle."
            )
    widest = max(max(g.lda, g.c_stride) for g in gemms.values())
    rows = _padded_rows(bundle, bundle.max_rows) + bundle.specs.mhas[-1].rows
    if 2 * rows * widest > MAX_BUFFER_BYTES:
        raise BundleError(
            f"manifest.txt: {rows} rows of {widest} elements take {2 * rows * widest} bytes, "
            f"wanted at most {MAX_BUFFER_BYTES}; re-export the bundle."
        )


def _check_stages(bundle: Bundle, normalize: bool) -> None:
    """The stages the manifest names must be the ones this file computes, no more and no fewer."""
    found = bundle.manifest.param_list("stages")
    wanted = [*STAGES, *(OPTIONAL_STAGES if normalize else ())]
    if list(found) != wanted:
        odd = sorted(set(found) ^ set(wanted))
        raise BundleError(
            f"manifest.txt: param stages {','.join(found)}, wanted {','.join(wanted)} "
            f"(not the same: {', '.join(odd) or 'their order'}); update npu-embed or re-export "
            "the bundle."
        )
