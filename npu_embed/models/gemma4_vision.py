"""gemma4_vision: the tower that makes soft tokens of images, which a text encoder reads as tokens.

A forward runs the patches of several images in one row buffer, as texts are packed: each image's
attention is a run of its own over its rows, everything else is over all rows. Layers are like those
of a Gemma encoder; a head's first half turns with a patch's column, the second with its row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..attention import Rotary, attend_texts
from ..bf16 import F32, to_f32
from ..bundle import Bundle
from ..device import Buffer
from ..heads import HeadStep
from ..images import ImageLimits, Patches
from ..npu import Npu
from ..packing import Pack
from ..rms import Put, add_rms_norm, put_rms_norm
from ..rows import Rows
from ..runs import GemmRun, MhaRun
from ..schedule import Steps, Stretch, stretches
from ..specs import GemmSpec
from ..trace import Timing
from . import checks
from .forward import upload
from .gemma4_vision_params import VISION, VisionParams, read_vision_params, vision_gemms

ENCODER = "vision_tower.encoder.layers"
POSITIONS = "vision_tower.patch_embedder.position_embedding_table"


@dataclass(frozen=True, slots=True)
class VisionLayer:
    """One layer's weights, as gemma_weights.Layer has them; down's has a B a slice of its K."""

    packed: Mapping[str, Buffer]
    down: tuple[Buffer, ...]
    heads: HeadStep
    post_attention_norm: F32
    post_feedforward_norm: F32


@dataclass(slots=True)
class VisionPass:
    """A pack of images on its way through the layers: x [rows, hidden_size] float32.

    positions [rows, 2]: (x, y) of every patch in its image.
    """

    x: F32
    buffers: Mapping[str, Rows]
    pack: Pack
    positions: NDArray[np.intp]
    timing: Timing


class Gemma4Vision:
    """A Gemma 4 vision tower on a device, with the projection to a text encoder's width."""

    def __init__(self, npu: Npu, bundle: Bundle, text_hidden_size: int) -> None:
        self.npu = npu
        self.bundle = bundle
        self.params: VisionParams = read_vision_params(bundle)
        self.text_hidden_size = text_hidden_size
        p, tensors = self.params, bundle.tensors
        self._gemms: Mapping[str, GemmSpec] = vision_gemms(bundle, p, text_hidden_size)
        checks.buffer_sizes(bundle.manifest, self._buffer_shapes().values(), f"max_rows.{VISION}")
        shape = (2, p.position_embedding_size, p.hidden_size)
        if tensors.dtype(POSITIONS) == "bf16":
            self._tables = to_f32(tensors.bf16(POSITIONS, shape))
        else:
            self._tables = tensors.f32(POSITIONS, shape)
        self._rotary = Rotary(p.rope_theta, p.head_dim // 2, p.longest_side)
        self._patch = self._upload("vision_tower.patch_embedder.input_proj", "patch")
        self._projection = self._upload("embed_vision.embedding_projection", "projection")
        self._layers = [self._layer(f"{ENCODER}.{i}") for i in range(p.num_hidden_layers)]
        self._slots: list[Mapping[str, Rows]] = []

    @property
    def limits(self) -> ImageLimits:
        """How images are prepared."""
        return self.params.limits

    @property
    def max_rows(self) -> int:
        """The most patches of a pack."""
        return self.params.max_rows

    def _upload(self, tensor: str, key: str) -> Buffer:
        return upload(self.npu.session, self.bundle, tensor, f"{key}.{VISION}")

    def _layer(self, name: str) -> VisionLayer:
        p = self.params

        def norm(tensor: str, width: int) -> F32:
            return self.bundle.tensors.f32(f"{name}.{tensor}.weight", (width,))

        # The array's softmax is to the base 2.
        scale = np.float32(math.log2(math.e) if p.attention_on_npu else 1)
        q, k = norm("self_attn.q_norm", p.head_dim), norm("self_attn.k_norm", p.head_dim)
        heads, kv_heads = p.num_attention_heads, p.num_key_value_heads
        norms = [q * scale] * heads + [k] * kv_heads + [np.ones_like(k)] * kv_heads
        turned = heads + kv_heads
        return VisionLayer(
            {key: self._upload(f"{name}.{key}", key) for key in ("qkv", "o", "gate_up")},
            self._upload_down(name),
            HeadStep(len(norms), turned, np.stack(norms), p.rms_norm_eps, self._rotary),
            norm("post_attention_layernorm", p.hidden_size),
            norm("post_feedforward_layernorm", p.hidden_size),
        )

    def _upload_down(self, layer: str) -> tuple[Buffer, ...]:
        slices = checks.slices(self._gemms["down"], self.params.intermediate_size)
        if slices == 1:
            return (self._upload(f"{layer}.down", "down"),)
        return tuple(self._upload(f"{layer}.down.{s}", "down") for s in range(slices))

    def _buffer_shapes(self) -> dict[str, tuple[int, int]]:
        """Every row buffer of a pack in flight: name -> rows, elements of a row."""
        gemms, p = self._gemms, self.params
        rows = checks.padded_rows(gemms.values(), p.max_rows)
        # A bucket reads and writes all its rows, past the last image too.
        slack = checks.buckets_of(self.bundle, VISION)[-1].rows if p.attention_on_npu else 0
        shapes = {
            "patches": (rows, gemms["patch"].lda),
            "x": (rows, gemms["qkv"].lda),
            "qkv": (rows, gemms["qkv"].c_stride),
            "attended": (rows + slack, gemms["o"].lda),
            "inner": (rows, gemms["gate_up"].c_stride),
            **{
                checks.slice_name("out", s): (rows, gemms["down"].c_stride)
                for s in range(checks.slices(gemms["down"], p.intermediate_size))
            },
            "soft": (rows, gemms["projection"].c_stride),
        }
        if p.attention_on_npu:
            shapes["heads"] = (rows + slack, gemms["qkv"].c_stride)
        return shapes

    def _slot(self, slot: int) -> Mapping[str, Rows]:
        """The buffers of a slot, made when it is first used."""
        while slot >= len(self._slots):
            self._slots.append(
                {
                    name: Rows(self.npu.session, rows, width)
                    for name, (rows, width) in self._buffer_shapes().items()
                }
            )
        return self._slots[slot]

    def contexts(self) -> list[str]:
        """The xclbin keys of a forward's stretches, in order."""
        ctx = {key: gemm.ctx for key, gemm in self._gemms.items()}
        layer = [ctx["qkv"]]
        if self.params.attention_on_npu:
            layer.append(checks.buckets_of(self.bundle, VISION)[0].ctx)
        layer += [ctx[key] for key in ("o", "gate_up", "down")]
        return [ctx["patch"], *layer * self.params.num_hidden_layers, ctx["projection"]]

    def steps(self, images: Sequence[Patches], pack: Pack, slot: int, timing: Timing) -> Steps:
        """A forward of a pack of images as a generator of what it runs on the NPU.

        It returns their soft tokens one after another, float32 [tokens, text_hidden_size]. images
        in the pack's order; slot: whose buffers to use.
        """
        buffers = self._slot(slot)
        with timing.stage("host"):
            buffers["patches"].put(np.concatenate([2 * image.pixels - 1 for image in images]))
            positions = np.concatenate([image.positions for image in images]).astype(np.intp, "C")
        yield Stretch("gemm", [self._gemm(buffers, pack.rows, "patch", "patches", self._patch)])
        with timing.stage("host"):
            x = buffers["out"].get(pack.rows, self.params.hidden_size)
            x += self._tables[0][positions[:, 0]]
            x += self._tables[1][positions[:, 1]]
            put_rms_norm(x, self.params.rms_norm_eps, buffers["x"])
        p = VisionPass(x, buffers, pack, positions, timing)
        for layer in self._layers:
            yield from self._attention(p, layer)
            yield from self._feed_forward(p, layer)
        with timing.stage("host"):
            pooled = np.concatenate(
                [
                    self._pool(x[start : start + len(image)], image)
                    for start, image in zip(pack.starts, images, strict=True)
                ]
            )
            put_rms_norm(pooled, self.params.rms_norm_eps, buffers["x"])
        tokens = len(pooled)
        run = self._gemm(buffers, tokens, "projection", "x", self._projection, "soft")
        yield Stretch("gemm", [run])
        with timing.stage("host"):
            return buffers["soft"].get(tokens, self.text_hidden_size)

    def _gemm(
        self, buffers: Mapping[str, Rows], rows: int, key: str, a: str, b: Buffer, c: str = "out"
    ) -> GemmRun:
        return GemmRun(f"{key}.{VISION}", buffers[a], b, buffers[c], rows)

    def _add(self, p: VisionPass, norm: F32, slices: int = 1, *, put: Put) -> None:
        """Do x += the norm of the sum of so many runs' results, and put it; as Gemma.add."""
        ys = [p.buffers[checks.slice_name("out", s)] for s in range(slices)]
        add_rms_norm(p.x, ys, norm, self.params.rms_norm_eps, out=p.buffers["x"], put=put)

    def _attention(self, p: VisionPass, layer: VisionLayer) -> Iterator[Stretch]:
        """Do x += norm(o(attention(qkv(x / rms(x))))), every patch seeing all of its image."""
        params, buffers, rows = self.params, p.buffers, p.pack.rows
        yield Stretch("gemm", [self._gemm(buffers, rows, "qkv", "x", layer.packed["qkv"], "qkv")])
        if params.attention_on_npu:
            with p.timing.stage("host"):
                layer.heads.put(buffers["qkv"], p.positions, buffers["heads"])
            # Ascending: each run's rows past its image are overwritten by the next image's run.
            yield Stretch(
                "mha",
                [
                    MhaRun(buffers["heads"], buffers["attended"], n, None, row, VISION)
                    for row, n in zip(p.pack.starts, p.pack.lengths, strict=True)
                ],
            )
        else:
            with p.timing.stage("host"):
                heads = layer.heads.get(buffers["qkv"], p.positions)
                k, v = params.num_attention_heads, layer.heads.turned
                parts = heads[:, :k], heads[:, k:v], heads[:, v:]
                buffers["attended"].put(attend_texts(*parts, p.pack.starts, p.pack.lengths, None))
        yield Stretch("gemm", [self._gemm(buffers, rows, "o", "attended", layer.packed["o"])])
        with p.timing.stage("host"):
            self._add(p, layer.post_attention_norm, put="norm")

    def _feed_forward(self, p: VisionPass, layer: VisionLayer) -> Iterator[Stretch]:
        """Do x += norm(down(geglu(gate_up(x / rms(x)))))."""
        buffers, rows, packed = p.buffers, p.pack.rows, layer.packed
        gate_up = self._gemm(buffers, rows, "gate_up", "x", packed["gate_up"], "inner")
        K = self._gemms["down"].K
        down = [
            GemmRun(
                f"down.{VISION}",
                buffers["inner"],
                b,
                buffers[checks.slice_name("out", s)],
                rows,
                s * K,
            )
            for s, b in enumerate(layer.down)
        ]
        yield from stretches(self.npu, "gemm", [gate_up, *down])
        with p.timing.stage("host"):
            put: Put = None if layer is self._layers[-1] else "norm"
            self._add(p, layer.post_feedforward_norm, len(down), put=put)

    def _pool(self, x: F32, image: Patches) -> F32:
        """The mean of each block of patches, times sqrt(hidden_size); blocks row by row."""
        k, width = self.limits.pooling_kernel_size, self.params.hidden_size
        blocks = x.reshape(image.rows // k, k, image.columns // k, k, width)
        pooled: F32 = blocks.mean(axis=(1, 3), dtype=np.float32).reshape(-1, width)
        pooled *= np.float32(math.sqrt(width))
        return pooled
