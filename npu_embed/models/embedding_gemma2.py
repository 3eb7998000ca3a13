"""embedding_gemma2's text encoder: a Gemma encoder whose layers have a gated input of their own.

Images are in image_encoder.py.

Three GEMMs more:

ple       of the scaled embeddings, before the first layer: the inputs of all layers
ple_gate  of x as it is, with GELU; the host multiplies by the layer's input
ple_proj  its norm is added to x, and the layer's scalar scales the sum
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np

from ..bf16 import F32
from ..bundle import Bundle
from ..rms import put_gated
from ..runs import GemmRun
from ..schedule import Stretch
from ..specs import GemmSpec
from .gemma import Gemma, Pass
from .gemma4_vision_params import has_vision
from .gemma_params import FULL, SLIDING
from .gemma_weights import Layer
from .image_encoder import ImageEncoder

FRAME = ("bos", "boi", "eoi", "eos")  # tokens around an image's soft ones: two before, two behind


class EmbeddingGemma2(Gemma):
    """An embedding_gemma2 text encoder on a device.

    Sliding and full layers have heads of their own, and so kernels. The projection to the length
    of an embedding is linear: it stays on the host, once a text after the mean.
    """

    prefix: ClassVar[str] = "language_model."
    suffixes: ClassVar[Mapping[str, str]] = {SLIDING: ".sliding", FULL: ".full"}
    value_norm: ClassVar[bool] = True
    before_layers = ("ple",)
    after_layer = ("ple_gate", "ple_proj")

    def _scale(self, bundle: Bundle) -> float:
        return 1.0

    def _read(self, bundle: Bundle) -> None:
        self.hidden_size_per_layer_input = bundle.manifest.param_int(
            "hidden_size_per_layer_input", minimum=1, maximum=1 << 16
        )

    def stages(self) -> list[str]:
        """What happens to a text, in order, as the manifest must name it."""
        found = ["embeddings", "per_layer_inputs", "layers", "norm", "pooling"]
        found.append("embedding_projection")
        return [*found, "normalize"] if self.params.normalize else found

    def _sizes(self, gemms: Mapping[str, GemmSpec]) -> dict[str, tuple[int, int, int | None]]:
        d, width = self.params.hidden_size, self.hidden_size_per_layer_input
        ple, gate, proj = gemms["ple"], gemms["ple_gate"], gemms["ple_proj"]
        x, out = gemms["gate_up"].lda, gemms["down"].c_stride
        return {
            "ple lda": (ple.lda, x, x),
            "ple n_out": (ple.n_out, width * len(self.params.layer_types), None),
            "ple_gate lda": (gate.lda, x, x),
            "ple_gate n_out": (gate.n_out, width, None),
            "ple_proj K": (proj.K, width, None),
            "ple_proj n_out": (proj.n_out, d, None),
            "ple_proj c_stride": (proj.c_stride, out, out),
        }

    def _widths(self, gemms: Mapping[str, GemmSpec]) -> dict[str, int]:
        return {
            "ple": gemms["ple"].c_stride,
            "gate": gemms["ple_gate"].c_stride,
            "gated": gemms["ple_proj"].lda,
        }

    def _load(self) -> None:
        d, dim, width = self.params.hidden_size, self.dim, self.hidden_size_per_layer_input
        tensors = self.bundle.tensors
        self._ple = self.upload(self._name("ple"), "ple")
        self._ple_norm = tensors.f32(self._name("ple.per_layer_projection_norm.weight"), (width,))
        self._projection = tensors.f32(self._name("embedding_projection.weight"), (dim, d))
        layers = range(len(self.params.layer_types))
        norm = "ple_block.post_per_layer_input_norm.weight"
        self._post_norms = [self.weight(i, norm, d) for i in layers]
        self._scalars = self._layer_scalars()
        self.images = ImageEncoder(self, self._frame()) if has_vision(self.bundle) else None

    def _most_positions(self) -> int:
        if not has_vision(self.bundle):
            return self.bundle.max_tokens
        soft = self.bundle.manifest.param_int("max_soft_tokens", minimum=1, maximum=1 << 16)
        return max(self.bundle.max_tokens, soft + len(FRAME))

    def _frame(self) -> F32:
        """The rows around an image's soft tokens [4, hidden_size]: of FRAME."""
        limit = self.params.vocab_size - 1
        ids = [
            self.bundle.manifest.param_int(f"{name}_token_id", minimum=0, maximum=limit)
            for name in FRAME
        ]
        assert self._table is not None
        return self._table.rows(np.array(ids, dtype=np.int32))

    def _layer_scalars(self) -> Sequence[np.float32]:
        """A number a layer."""
        return [self.weight(i, "layer_scalar", 1)[0] for i in range(len(self.params.layer_types))]

    def _before(self, p: Pass) -> Iterator[Stretch]:
        """Every layer's input, which stays where it is, as bits: they are many."""
        rows, buffers = p.pack.rows, p.buffers
        with p.timing.stage("host"):
            buffers["x"].put(p.x)
        yield Stretch("gemm", [GemmRun("ple", buffers["x"], self._ple, buffers["ple"], rows)])
        with p.timing.stage("host"):
            width = len(self.params.layer_types) * self.hidden_size_per_layer_input
            p.per_layer = buffers["ple"].receive(rows, width)

    def _gate(self, p: Pass, index: int) -> None:
        """Put gate * norm(c / sqrt(hidden_size)), c the layer's columns of what `ple` gave.

        The quotient's norm is that of c with an eps hidden_size times as large.
        """
        assert p.per_layer is not None
        elements, first, stride = p.per_layer
        c = elements, first + index * self.hidden_size_per_layer_input, stride
        eps, buffers = self.params.rms_norm_eps * self.params.hidden_size, p.buffers
        put_gated(buffers["gate"], c, p.pack.rows, self._ple_norm, eps, buffers["gated"])

    def _after(self, p: Pass, layer: Layer) -> Iterator[Stretch]:
        yield Stretch("gemm", [self.gemm(p, layer, "ple_gate", "x", "gate")])
        with p.timing.stage("host"):
            self._gate(p, layer.index)
        yield Stretch("gemm", [self.gemm(p, layer, "ple_proj", "gated", "out")])
        with p.timing.stage("host"):
            scale, put = self._scalars[layer.index], self.following(layer)
            self.add(p, self._post_norms[layer.index], scale=scale, put=put)

    def _head(self, p: Pass, pooled: F32) -> Generator[Stretch, None, F32]:
        yield from ()
        with p.timing.stage("pooling"):
            embeddings: F32 = pooled @ self._projection.T
        return embeddings
