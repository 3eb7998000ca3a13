"""What the Gemma encoders share: layers of four norms, two types of attention, a mean over tokens.

A layer on the device: qkv GEMM -> the host turns and scales q and k -> MHA -> o GEMM reads its
result in place; gate_up GEMM with GeGLU -> down GEMM reads its C in place. The host adds residuals
and norms in float32. Norms before a GEMM are x / rms(x) here: their weight is in the GEMM's B.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ..attention import Rotary, attend_texts
from ..bf16 import F32, RowBuffer
from ..bundle import Bundle
from ..device import Buffer, Session
from ..heads import HeadStep
from ..hostops import mean_pool, row_numbers, unit_rows
from ..npu import Npu
from ..packing import Pack
from ..rms import ONE, Put, add_rms_norm, put_rms_norm, rms_norm
from ..rows import Rows
from ..runs import GemmRun, MhaRun
from ..schedule import Steps, Stretch, stretches
from ..specs import GemmSpec
from ..trace import Timing
from . import checks
from .forward import Tap, upload
from .gemma_params import GemmaParams, read_params
from .gemma_weights import EmbeddingTable, Layer

MLP = ("gate_up", "down")
Buffers = Mapping[str, Rows]


@dataclass(slots=True)
class Pass:
    """A pack on its way through the layers: x [rows, hidden_size], its row buffers.

    positions [rows, 1]. per_layer: what a family makes of the embeddings, for all its layers.
    """

    x: F32
    buffers: Buffers
    pack: Pack
    positions: NDArray[np.intp]
    timing: Timing
    per_layer: RowBuffer | None = None


class Gemma(ABC):
    """A Gemma encoder on a device; a family says what it adds before, in and after the layers."""

    prefix: ClassVar[str] = ""  # of tensor names
    suffixes: ClassVar[Mapping[str, str]]  # of the kernels of each type of layer
    value_norm: ClassVar[bool] = False  # v / rms(v), without a weight
    before_layers: tuple[str, ...] = ()  # the family's own GEMMs
    after_layer: tuple[str, ...] = ()
    after_pooling: tuple[str, ...] = ()

    def __init__(self, session: Session, bundle: Bundle, max_rows: int) -> None:
        self.max_rows = max_rows
        self.bundle = bundle
        self.params: GemmaParams = read_params(bundle, self.suffixes, self._scale(bundle))
        self.dim = self.params.dim
        self._read(bundle)
        checks.stages(bundle, self.stages())
        self._check_kernels()
        p, tensors = self.params, bundle.tensors
        self._table = self._embedding_table()
        self._norm = tensors.f32(self._name("norm.weight"), (p.hidden_size,))
        self._rotary = {
            kind: Rotary(a.rope_theta, a.head_dim, self._most_positions())
            for kind, a in p.attention.items()
        }
        self.npu = Npu(session, bundle)
        self._slots: list[Buffers] = []
        self._layers = [self._layer(i, kind) for i, kind in enumerate(p.layer_types)]
        self._load()

    # -- what a family says -------------------------------------------------------------------

    @abstractmethod
    def _scale(self, bundle: Bundle) -> float:
        """The scale of q k^T."""

    @abstractmethod
    def stages(self) -> list[str]:
        """What happens to a text, in order, as the manifest must name it."""

    @abstractmethod
    def _read(self, bundle: Bundle) -> None:
        """Read the family's own params."""

    @abstractmethod
    def _load(self) -> None:
        """Load the family's own weights."""

    def _most_positions(self) -> int:
        """The longest text that is encoded."""
        return self.bundle.max_tokens

    def _sizes(self, gemms: Mapping[str, GemmSpec]) -> dict[str, tuple[int, int, int | None]]:
        """Sizes of the family's own GEMMs, as checks.sizes takes them."""
        return {}

    def _widths(self, gemms: Mapping[str, GemmSpec]) -> dict[str, int]:
        """The family's own row buffers: name -> elements of a row."""
        return {}

    def _before(self, p: Pass) -> Iterator[Stretch]:
        """Whatever the layers need that is made from the embeddings."""
        yield from ()

    def _after(self, p: Pass, layer: Layer) -> Iterator[Stretch]:
        """What ends a layer."""
        yield from ()

    def _head(self, p: Pass, pooled: F32) -> Generator[Stretch, None, F32]:
        """The embeddings [texts, dim] from the mean rows [texts, hidden_size]."""
        yield from ()
        return pooled

    def _embedding_table(self) -> EmbeddingTable | None:
        """The table of embeddings, None where no text can be embedded."""
        name = self._name("embed_tokens.weight")
        return EmbeddingTable(self.bundle.tensors, name, self.params)

    # -- loading ------------------------------------------------------------------------------

    def _name(self, tensor: str) -> str:
        return self.prefix + tensor

    def weight(self, layer: int, tensor: str, width: int) -> F32:
        """A layer's float32 tensor [width] that stays on the host."""
        return self.bundle.tensors.f32(self._name(f"layers.{layer}.{tensor}"), (width,))

    def upload(self, tensor: str, key: str) -> Buffer:
        """A packed weight of a GEMM on the device."""
        return upload(self.npu.session, self.bundle, tensor, key)

    def _upload_slices(self, tensor: str, key: str, slices: int) -> tuple[Buffer, ...]:
        """The packed weights of a GEMM whose K is cut, one a slice."""
        if slices == 1:
            return (self.upload(tensor, key),)
        return tuple(self.upload(f"{tensor}.{s}", key) for s in range(slices))

    def _slices(self, key: str, width: int) -> int:
        """How many runs of a GEMM make one product over `width` columns."""
        return checks.slices(self.bundle.specs.gemms[key], width)

    def _layer(self, index: int, kind: str) -> Layer:
        d, a = self.params.hidden_size, self.params.attention[kind]
        # The array's softmax is to the base 2.
        scale = a.scale * (math.log2(math.e) if self.params.attention_on_npu else 1)
        q = self.weight(index, "self_attn.q_norm.weight", a.head_dim) * np.float32(scale)
        k = self.weight(index, "self_attn.k_norm.weight", a.head_dim)
        turned = a.num_attention_heads + a.num_key_value_heads
        norms = [q] * a.num_attention_heads + [k] * a.num_key_value_heads
        if self.value_norm:
            norms += [np.ones_like(k)] * a.num_key_value_heads
        heads = HeadStep(
            turned + a.num_key_value_heads,
            turned,
            np.stack(norms),
            self.params.rms_norm_eps,
            self._rotary[kind],
        )
        name = self._name(f"layers.{index}")
        o, inner = self._slices(f"o{a.suffix}", a.q_width), self.params.intermediate_size
        packed = {
            f"qkv{a.suffix}": (self.upload(f"{name}.qkv", f"qkv{a.suffix}"),),
            f"o{a.suffix}": self._upload_slices(f"{name}.o", f"o{a.suffix}", o),
            "gate_up": (self.upload(f"{name}.gate_up", "gate_up"),),
            "down": self._upload_slices(f"{name}.down", "down", self._slices("down", inner)),
        }
        for key in self.after_layer:
            packed[key] = (self.upload(f"{name}.{key}", key),)
        return Layer(
            index,
            a,
            packed,
            heads,
            self.weight(index, "post_attention_layernorm.weight", d),
            self.weight(index, "post_feedforward_layernorm.weight", d),
        )

    def _check_kernels(self) -> None:
        """The GEMMs must fit each other's buffers, as the forward chains them."""
        p, bundle = self.params, self.bundle
        buckets = [a.bucket for a in p.attention.values()] if p.attention_on_npu else []
        own = [f"{key}{a.suffix}" for a in p.attention.values() for key in ("qkv", "o")]
        keys = tuple(dict.fromkeys((*self.before_layers, *own, *MLP, *self.after_layer)))
        checks.kernels(bundle, (*keys, *self.after_pooling), mha=dict.fromkeys(buckets))
        gemms = bundle.specs.gemms
        checks.gemm_views(gemms[key] for key in (*keys, *self.after_pooling))
        d, gate_up, down = p.hidden_size, gemms["gate_up"], gemms["down"]
        wanted: dict[str, tuple[int, int, int | None]] = {
            "gate_up K": (gate_up.K, d, None),
            "gate_up n_out": (gate_up.n_out, p.intermediate_size, None),
            "down lda": (down.lda, gate_up.c_stride, gate_up.c_stride),
            **checks.slice_sizes("down", down, p.intermediate_size),
            "down n_out": (down.n_out, d, None),
        }
        for a in p.attention.values():
            qkv, o = gemms[f"qkv{a.suffix}"], gemms[f"o{a.suffix}"]
            wanted |= {
                f"qkv{a.suffix} lda": (qkv.lda, gate_up.lda, gate_up.lda),
                f"qkv{a.suffix} n_out": (qkv.n_out, a.qkv_width, None),
                **checks.slice_sizes(f"o{a.suffix}", o, a.q_width),
                f"o{a.suffix} c_stride": (o.c_stride, down.c_stride, down.c_stride),
            }
            if p.attention_on_npu:
                checks.longest_bucket(bundle, a.bucket)
                checks.mha_views(checks.buckets_of(bundle, a.bucket), qkv.c_stride, o.lda)
                heads = {"heads": a.num_attention_heads, "kv_heads": a.num_key_value_heads}
                checks.bucket_heads(bundle, a.bucket, {**heads, "head_dim": a.head_dim})
        checks.sizes(wanted | self._sizes(gemms))
        checks.buffer_sizes(bundle.manifest, self._buffer_shapes(bundle.max_rows).values())

    def _buffer_shapes(self, max_rows: int) -> dict[str, tuple[int, int]]:
        """Every row buffer of a pack in flight: name -> rows, elements of a row."""
        gemms = self.bundle.specs.gemms
        rows = checks.padded_rows(gemms.values(), max_rows)
        widths = {
            "x": gemms["gate_up"].lda,
            "inner": gemms["gate_up"].c_stride,
            **{
                checks.slice_name("out", s): gemms["down"].c_stride
                for s in range(self._most_slices())
            },
        }
        widths |= self._widths(gemms)
        shapes = {name: (rows, width) for name, width in widths.items()}
        # A bucket reads and writes all its rows, past the last text too.
        attention = self.params.attention.values() if self.params.attention_on_npu else ()
        mhas = [mha for a in attention for mha in checks.buckets_of(self.bundle, a.bucket)]
        slack = max((mha.rows for mha in mhas), default=0)
        for a in self.params.attention.values():
            qkv, o = gemms[f"qkv{a.suffix}"], gemms[f"o{a.suffix}"]
            shapes[f"qkv{a.suffix}"] = (rows, qkv.c_stride)
            shapes[f"attended{a.suffix}"] = (rows + slack, o.lda)
            if self.params.attention_on_npu:
                shapes[f"heads{a.suffix}"] = (rows + slack, qkv.c_stride)
        return shapes

    def _most_slices(self) -> int:
        """The most slices that a product is the sum of."""
        p = self.params
        widths = {f"o{a.suffix}": a.q_width for a in p.attention.values()}
        widths["down"] = p.intermediate_size
        return max(self._slices(key, width) for key, width in widths.items())

    def _slot(self, slot: int) -> Buffers:
        """The buffers of a slot, made when it is first used."""
        while slot >= len(self._slots):
            shapes = self._buffer_shapes(self.max_rows)
            self._slots.append(
                {
                    name: Rows(self.npu.session, rows, width)
                    for name, (rows, width) in shapes.items()
                }
            )
        return self._slots[slot]

    # -- running ------------------------------------------------------------------------------

    def contexts(self) -> list[str]:
        """The xclbin keys of a forward's stretches, in order."""
        specs, p = self.bundle.specs, self.params
        found = [specs.gemms[key].ctx for key in self.before_layers]
        for kind in p.layer_types:
            a = p.attention[kind]
            found.append(specs.gemms[f"qkv{a.suffix}"].ctx)
            if p.attention_on_npu:
                found.append(checks.buckets_of(self.bundle, a.bucket)[0].ctx)
            rest = (f"o{a.suffix}", *MLP, *self.after_layer)
            found += [specs.gemms[key].ctx for key in rest]
        return found + [specs.gemms[key].ctx for key in self.after_pooling]

    def steps(
        self,
        ids: Sequence[NDArray[np.int32]],
        pack: Pack,
        slot: int,
        timing: Timing,
        tap: Tap | None = None,
    ) -> Steps:
        """A forward of a pack; see Forward.steps."""
        assert self._table is not None, "a bundle for images only tokenizes no text"
        with timing.stage("embeddings"):
            x = self._table.rows(np.concatenate(ids))
        return (yield from self.encode(x, pack, slot, timing, tap))

    def encode(
        self, x: F32, pack: Pack, slot: int, timing: Timing, tap: Tap | None = None
    ) -> Steps:
        """A forward of a pack from what its first layer is given, x [rows, hidden_size].

        x is overwritten; the rest is as in steps.
        """
        positions = row_numbers(pack.starts, pack.lengths)[:, None]
        p = Pass(x, self._slot(slot), pack, positions, timing)
        if tap is not None:
            tap("embeddings", p.x)
        yield from self._before(p)
        with timing.stage("host"):
            put_rms_norm(p.x, self.params.rms_norm_eps, p.buffers["x"])
        for layer in self._layers:
            yield from self._attention(p, layer)
            yield from self._feed_forward(p, layer)
            yield from self._after(p, layer)
            if tap is not None:
                tap(f"layer {layer.index}", p.x)
        with timing.stage("pooling"):
            x = rms_norm(p.x, self._norm, self.params.rms_norm_eps, out=p.x)
            pooled = mean_pool(x, pack.starts, pack.lengths)
        pooled = yield from self._head(p, pooled)
        with timing.stage("pooling"):
            return unit_rows(pooled) if self.params.normalize else pooled

    def gemm(self, p: Pass, layer: Layer, key: str, a: str, c: str) -> GemmRun:
        """A layer's GEMM from one row buffer into another, by their names."""
        return GemmRun(key, p.buffers[a], layer.packed[key][0], p.buffers[c], p.pack.rows)

    def sliced(self, p: Pass, layer: Layer, key: str, a: str) -> list[GemmRun]:
        """A layer's GEMM as a run for each slice of its K, into `out`, `out.1` ... for `add`."""
        K = self.bundle.specs.gemms[key].K
        return [
            GemmRun(
                key, p.buffers[a], b, p.buffers[checks.slice_name("out", s)], p.pack.rows, s * K
            )
            for s, b in enumerate(layer.packed[key])
        ]

    def add(
        self, p: Pass, norm: F32, slices: int = 1, *, scale: np.float32 = ONE, put: Put
    ) -> None:
        """Do x = (x + the norm of the sum of so many runs' results) * scale, and put it.

        The runs left them in `out`, `out.1` ...; `put` is what the next run reads of x.
        """
        ys = [p.buffers[checks.slice_name("out", s)] for s in range(slices)]
        eps = self.params.rms_norm_eps
        add_rms_norm(p.x, ys, norm, eps, scale=scale, out=p.buffers["x"], put=put)

    def following(self, layer: Layer) -> Put:
        """What the next layer reads of x; behind the last one nothing does."""
        return None if layer is self._layers[-1] else "norm"

    def _attention(self, p: Pass, layer: Layer) -> Iterator[Stretch]:
        """Do x += norm(o(attention(qkv(x / rms(x)))))."""
        a, buffers = layer.attention, p.buffers
        qkv, attended = f"qkv{a.suffix}", f"attended{a.suffix}"
        yield Stretch("gemm", [self.gemm(p, layer, qkv, "x", qkv)])
        if self.params.attention_on_npu:
            staged = buffers[f"heads{a.suffix}"]
            with p.timing.stage("host"):
                layer.heads.put(buffers[qkv], p.positions, staged)
            # Ascending: each run's rows past its text are overwritten by the next text's run.
            yield Stretch(
                "mha",
                [
                    MhaRun(staged, buffers[attended], n, a.window_for(n), row, a.bucket)
                    for row, n in zip(p.pack.starts, p.pack.lengths, strict=True)
                ],
            )
        else:
            with p.timing.stage("host"):
                heads = layer.heads.get(buffers[qkv], p.positions)
                k, v = a.num_attention_heads, layer.heads.turned
                parts = heads[:, :k], heads[:, k:v], heads[:, v:]
                buffers[attended].put(attend_texts(*parts, p.pack.starts, p.pack.lengths, a.window))
        o = self.sliced(p, layer, f"o{a.suffix}", attended)
        yield Stretch("gemm", o)
        with p.timing.stage("host"):
            self.add(p, layer.post_attention_norm, len(o), put="norm")

    def _feed_forward(self, p: Pass, layer: Layer) -> Iterator[Stretch]:
        """Do x += norm(down(geglu(gate_up(x / rms(x)))))."""
        gate_up = self.gemm(p, layer, "gate_up", "x", "inner")
        down = self.sliced(p, layer, "down", "inner")
        yield from stretches(self.npu, "gemm", [gate_up, *down])
        with p.timing.stage("host"):
            # A family's own GEMM behind it reads x as it is.
            put: Put = "x" if self.after_layer else self.following(layer)
            self.add(p, layer.post_feedforward_norm, len(down), put=put)

    def close(self) -> None:
        """Release kernels and contexts, then the weights' and the rows' buffers."""
        self.npu.close()
        self._layers.clear()
        self._slots.clear()
