"""Npu: a bundle's kernels on a device, loaded on first use, dropped when their slot is needed."""

from __future__ import annotations

import logging
import posixpath
from dataclasses import dataclass, field

from .bundle import Bundle
from .device import Buffer, Context, Kernel, Session
from .errors import BundleError, NoFreeContext
from .rows import Rows
from .specs import GemmSpec, MhaSpec

log = logging.getLogger("npu_embed")

Words = tuple[int, int]  # valid keys, window
Place = tuple[str, str]  # xclbin file, kernel name


@dataclass(slots=True)
class _Loaded:
    """A context and the kernels loaded into it, with the words last patched into each."""

    context: Context
    kernels: dict[str, Kernel] = field(default_factory=dict)
    patched: dict[str, Words] = field(default_factory=dict)

    def release(self) -> None:
        """Free instruction buffers, kernels and the context, in this order; forget the words."""
        for kernel in self.kernels.values():
            kernel.release()
        self.kernels.clear()
        self.patched.clear()
        self.context.release()


class Npu:
    """Runs the GEMM and MHA kernels of a bundle.

    Contexts are counted in `session.counters`: a *swap* is a context dropped to make room for
    another, a *switch* a run in another context than the one before. Kernels never leave this
    class: a dropped one could not be told from a live one.
    """

    def __init__(self, session: Session, bundle: Bundle) -> None:
        if session.generation is not None and session.generation != bundle.target:
            raise BundleError(
                f"{bundle.path.name}: kernels for {bundle.target}, this NPU is "
                f"{session.generation} ({session.device_name}); re-export with --target "
                f"{session.generation}."
            )
        self.session = session
        self.bundle = bundle
        self.no_window = bundle.no_window
        # Keys that name the same kernel of the same file share a context.
        self._places = {
            ctx: (posixpath.normpath(x.file), x.kernel_name)
            for ctx, x in bundle.manifest.xclbins.items()
        }
        self._loaded: dict[Place, _Loaded] = {}
        self._last: Place | None = None

    def _context(self, ctx: str) -> _Loaded:
        """The context of a key, created if need be; others are dropped only if it has no slot."""
        place = self._places[ctx]
        loaded = self._loaded.get(place)
        if loaded is not None:
            return loaded
        path = self.bundle.xclbin(ctx)
        dropped = 0
        while True:
            try:
                context = self.session.context(path, place[1])
            except NoFreeContext as error:
                if not self._loaded:
                    raise NoFreeContext(
                        f"{path.name}: no free hardware context after dropping our other {dropped} "
                        f"({self.session.slots_text()}); close other NPU programs, `xrt-smi "
                        f"examine -r aie-partitions` lists them. XRT said: {error}"
                    ) from error
                self._drop_one()
                dropped += 1
                continue
            self._loaded[place] = loaded = _Loaded(context)
            return loaded

    def _drop_one(self) -> None:
        """Release the context loaded first."""
        place = next(iter(self._loaded))
        log.debug("swap: %s dropped", place[0])
        self._loaded.pop(place).release()
        self.session.counters.swaps += 1

    def _kernel(self, spec: GemmSpec | MhaSpec, name: str, file: str) -> tuple[_Loaded, Kernel]:
        """The kernel of a stream; files are read and checked before any context is touched."""
        loaded = self._loaded.get(self._places[spec.ctx])
        if loaded is not None and name in loaded.kernels:
            return loaded, loaded.kernels[name]
        stream = self.bundle.stream(spec, file)
        loaded = self._context(spec.ctx)
        kernel = loaded.kernels[name] = loaded.context.load(name, stream)
        return loaded, kernel

    def _count_switch(self, ctx: str) -> None:
        place = self._places[ctx]
        if self._last is not None and self._last != place:
            self.session.counters.switches += 1
        self._last = place

    def run_gemm(self, key: str, a: Rows, col: int, w: Buffer, c: Rows, rows: int) -> None:
        """c[:rows] = epilogue(a[:rows, col:col+K] B + bias), by the shortest stream that fits.

        a, c: row buffers; w: the packed B. Rows of c past `rows` up to a multiple of M are
        overwritten with what follows from whatever a holds there.

        Raises:
            ValueError: more rows than the longest stream, or views that leave the buffers.
            NoFreeContext, RunFailed, DeviceError: from the device.
        """
        spec = self.bundle.specs.gemms[key]
        chunks = spec.chunks_for(rows)
        _, kernel = self._kernel(spec, spec.kernel_id(chunks), spec.insts[chunks - 1])
        self._count_switch(spec.ctx)
        kernel.run(
            (
                a.view(0, col, spec.a_elems[chunks - 1]),
                w.view(0, w.size),
                c.view(0, 0, spec.c_elems[chunks - 1]),
            )
        )

    def run_mha(
        self,
        qkv: Rows,
        o: Rows,
        rows: int,
        window: int | None = None,
        row: int = 0,
        name: str | None = None,
    ) -> None:
        """o[row:] = attention among `rows` rows of qkv from `row` on, in the shortest bucket.

        name: whose buckets, where the bundle has several head geometries. window: keys further
        than this from the query take no part; None = all do. The bucket's rows past `rows` are
        overwritten with no meaning: run the texts of a pack in ascending order, and keep as many
        rows free behind the last one.

        Raises:
            ValueError: no bucket holds `rows`, or the bucket leaves a buffer.
            NoFreeContext, RunFailed, DeviceError: from the device.
        """
        specs = self.bundle.specs
        spec = specs.mha_for(rows, name)
        if spec is None or rows < 1:
            buckets = specs.mhas if name is None else specs.buckets.get(name, ())
            longest = buckets[-1].rows if buckets else 0
            raise ValueError(f"{name or 'mha'}: {rows} rows, wanted 1 to {longest}.")
        views = (
            qkv.view(row, 0, spec.q_elems),
            qkv.view(row, 0, spec.k_elems),
            qkv.view(row, 0, spec.v_elems),
            o.view(row, 0, spec.o_elems),
        )
        name = spec.kernel_id
        loaded, kernel = self._kernel(spec, name, spec.insts)
        words = (rows, self.no_window if window is None else window)
        if loaded.patched.get(name) != words:
            # Until the patch has succeeded nobody knows what the stream holds.
            loaded.patched.pop(name, None)
            kernel.patch(
                {
                    **dict.fromkeys(spec.kv_words, words[0]),
                    **dict.fromkeys(spec.win_words, words[1]),
                }
            )
            loaded.patched[name] = words
        self._count_switch(spec.ctx)
        kernel.run(views)

    def close(self) -> None:
        """Release every kernel and context."""
        while self._loaded:
            self._loaded.popitem()[1].release()
        self._last = None
