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
from ..cores import run_rows
from ..device import Buffer, Session
from ..errors import BundleError
from ..hostops import POOLINGS, add_layer_norm, put_layer_norm, row_numbers, unit_rows
from ..manifest import Manifest
from ..npu import Npu
from ..packing import Pack
from ..rows import Rows
from ..runs import GemmRun, MhaRun
from ..schedule import Steps, Stretch, stretches
from ..trace import Timing
from . import checks
from .forward import Tap, upload

GEMMS = ("qkv", "o", "up", "down")
STAGES = ("embeddings", "layers", "pooling")
OPTIONAL_STAGES = ("normalize",)


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


@dataclass(frozen=True, slots=True)
class _Slot:
    """The row buffers of one pack in flight."""

    x: Rows
    qkv: Rows
    att: Rows
    out: Rows
    inner: Rows

    @classmethod
    def allocate(cls, session: Session, bundle: Bundle, max_rows: int) -> _Slot:
        """Buffers for packs of up to max_rows rows."""
        gemms = bundle.specs.gemms
        rows = checks.padded_rows([gemms[key] for key in GEMMS], max_rows)
        slack = bundle.specs.mhas[-1].rows  # a bucket writes all its rows, past the last text too
        return cls(
            x=Rows(session, rows, gemms["qkv"].lda),
            qkv=Rows(session, rows + slack, gemms["qkv"].c_stride),
            att=Rows(session, rows + slack, gemms["o"].lda),
            out=Rows(session, rows, gemms["o"].c_stride),
            inner=Rows(session, rows, gemms["up"].c_stride),
        )


class Bert:
    """A BERT encoder with pooling, on a device."""

    def __init__(self, session: Session, bundle: Bundle, max_rows: int) -> None:
        manifest = bundle.manifest
        self.max_rows = max_rows
        self.hidden_size = manifest.param_int("hidden_size", minimum=1, maximum=1 << 16)
        self.num_hidden_layers = manifest.param_int("num_hidden_layers", minimum=1, maximum=1024)
        self.vocab_size = manifest.param_int("vocab_size", minimum=1, maximum=1 << 24)
        self.layer_norm_eps = checks.epsilon(manifest, "layer_norm_eps")
        self.dim = self.hidden_size
        self.pool = POOLINGS[checks.choice(manifest, "pooling", POOLINGS)]
        self.normalize = manifest.param_flag("normalize")
        checks.stages(bundle, [*STAGES, *(OPTIONAL_STAGES if self.normalize else ())])
        self._check_gemms(bundle)

        d = self.hidden_size
        tensors = bundle.tensors
        positions = manifest.param_int("max_position_embeddings", minimum=1, maximum=1 << 20)
        types = manifest.param_int("type_vocab_size", minimum=1, maximum=1 << 16)
        used = self.first_position(manifest) + bundle.max_tokens
        if used > positions:
            raise BundleError(
                f"manifest.txt: param max_tokens {bundle.max_tokens}, wanted at most "
                f"{positions - used + bundle.max_tokens} by max_position_embeddings {positions}; "
                "re-export the bundle."
            )
        self._words = tensors.f32("embeddings.word_embeddings.weight", (self.vocab_size, d))
        # Every token is of type 0, so its row is the same for all: added to the positions once.
        position = tensors.f32("embeddings.position_embeddings.weight", (positions, d))
        token_type = tensors.f32("embeddings.token_type_embeddings.weight", (types, d))
        self._positions = position[:used]
        self._token_type = token_type[0]
        self._embedding_norm = self._norm(bundle, "embeddings.LayerNorm")

        self.npu = Npu(session, bundle)
        self._slots = [_Slot.allocate(session, bundle, max_rows)]
        self._layers = [self._layer(session, bundle, i) for i in range(self.num_hidden_layers)]

    @staticmethod
    def first_position(manifest: Manifest) -> int:
        """The position of a text's first token."""
        return 0

    def position_ids(self, ids: NDArray[np.int32], pack: Pack) -> NDArray[np.intp]:
        """Each token's row of the position table: 0, 1, ... n-1 for each text in turn."""
        return row_numbers(pack.starts, pack.lengths)

    def _check_gemms(self, bundle: Bundle) -> None:
        """The four GEMMs must fit each other's buffers, as the forward chains them."""
        checks.kernels(bundle, GEMMS, mha=(None,))
        qkv, o, up, down = gemms = [bundle.specs.gemms[key] for key in GEMMS]
        buckets = bundle.specs.mhas
        d = self.hidden_size
        checks.gemm_views(gemms)
        checks.mha_views(buckets, qkv.c_stride, o.lda)
        rows = checks.padded_rows(gemms, bundle.max_rows) + buckets[-1].rows
        widths = (qkv.lda, qkv.c_stride, o.lda, o.c_stride, up.c_stride)
        checks.buffer_sizes(bundle.manifest, ((rows, width) for width in widths))
        checks.sizes(
            {
                "qkv N": (qkv.N, 3 * d, None),
                "up lda": (up.lda, qkv.lda, qkv.lda),
                "down lda": (down.lda, up.c_stride, up.c_stride),
                "down c_stride": (down.c_stride, o.c_stride, o.c_stride),
                "o N": (o.N, d, None),
                "qkv lda": (qkv.lda, d, None),
            }
        )
        checks.longest_bucket(bundle)

    def _norm(self, bundle: Bundle, name: str) -> Norm:
        shape = (self.hidden_size,)
        tensors = bundle.tensors
        return Norm(tensors.f32(f"{name}.weight", shape), tensors.f32(f"{name}.bias", shape))

    def _layer(self, session: Session, bundle: Bundle, index: int) -> Layer:
        name = f"encoder.layer.{index}"
        return Layer(
            {key: upload(session, bundle, f"{name}.{key}", key) for key in GEMMS},
            self._norm(bundle, f"{name}.attention.output.LayerNorm"),
            self._norm(bundle, f"{name}.output.LayerNorm"),
        )

    def contexts(self) -> list[str]:
        """The xclbin keys of a forward's stretches, in order."""
        specs = self.npu.bundle.specs
        qkv, o, up, down = (specs.gemms[key].ctx for key in GEMMS)
        return [qkv, specs.mhas[0].ctx, o, up, down] * self.num_hidden_layers

    def steps(
        self,
        ids: Sequence[NDArray[np.int32]],
        pack: Pack,
        slot: int,
        timing: Timing,
        tap: Tap | None = None,
    ) -> Steps:
        """A forward of a pack; see Forward.steps."""
        buffers, rows, eps = self._slot(slot), pack.rows, self.layer_norm_eps
        with timing.stage("embeddings"):
            x = self._embed(ids, pack, buffers.x)
        if tap is not None:
            tap("embeddings", x)
        # Ascending: each run's rows past its text are overwritten by the next text's run.
        texts = zip(pack.starts, pack.lengths, strict=True)
        attention = Stretch(
            "mha", tuple(MhaRun(buffers.qkv, buffers.att, n, row=row) for row, n in texts)
        )
        for index, layer in enumerate(self._layers):
            packed = layer.packed
            yield Stretch("gemm", [GemmRun("qkv", buffers.x, packed["qkv"], buffers.qkv, rows)])
            yield attention
            yield Stretch("gemm", [GemmRun("o", buffers.att, packed["o"], buffers.out, rows)])
            with timing.stage("host"):
                norm = layer.attention_norm
                add_layer_norm(x, buffers.out, norm.weight, norm.bias, eps, buffers.x)
            up = GemmRun("up", buffers.x, packed["up"], buffers.inner, rows)
            down = GemmRun("down", buffers.inner, packed["down"], buffers.out, rows)
            yield from stretches(self.npu, "gemm", [up, down])
            with timing.stage("host"):
                norm = layer.output_norm
                following = None if layer is self._layers[-1] else buffers.x
                add_layer_norm(x, buffers.out, norm.weight, norm.bias, eps, following)
            if tap is not None:
                tap(f"layer {index}", x)
        with timing.stage("pooling"):
            pooled = self.pool(x, pack.starts, pack.lengths)
            return unit_rows(pooled) if self.normalize else pooled

    def _slot(self, slot: int) -> _Slot:
        """The buffers of a slot; the second one is only made for a second pack."""
        while slot >= len(self._slots):
            self._slots.append(_Slot.allocate(self.npu.session, self.npu.bundle, self.max_rows))
        return self._slots[slot]

    def _embed(self, ids: Sequence[NDArray[np.int32]], pack: Pack, out: Rows) -> F32:
        """LayerNorm(word + type + position) of every token, float32 [rows, hidden_size]; put."""
        flat = np.concatenate(ids)
        checks.token_ids(flat, self.vocab_size)
        x: F32 = np.empty((len(flat), self.hidden_size), dtype=np.float32)
        places = self.position_ids(flat, pack)

        def gather(start: int, stop: int) -> None:
            rows = x[start:stop]
            np.take(self._words, flat[start:stop], axis=0, out=rows, mode="clip")
            np.add(rows, self._token_type, out=rows)
            np.add(rows, self._positions[places[start:stop]], out=rows)

        run_rows(len(x), self.hidden_size, gather)
        norm = self._embedding_norm
        put_layer_norm(x, norm.weight, norm.bias, self.layer_norm_eps, out)
        return x

    def close(self) -> None:
        """Release kernels and contexts, then the weights' and the rows' buffers."""
        self.npu.close()
        self._layers.clear()
        self._slots.clear()
