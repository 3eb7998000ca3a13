"""Contexts: a bundle's hardware contexts, made on first use, dropped when their slot is needed."""

from __future__ import annotations

import logging
import posixpath
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from . import events, settings
from .bundle import Bundle
from .device import Context, Session
from .errors import InputError, NoFreeContext
from .eviction import POLICIES, Eviction
from .idle import call_in
from .loaded import LoadedContext
from .waiting import line

log = logging.getLogger("npu_embed")

Place = tuple[str, str]  # xclbin file, kernel name: what a context is created for

# While others hold the slots: tried again after a random time in this range.
RETRY_S = (0.001, 0.02)
# How long an engine keeps its contexts while another one waits with none: a turn costs what making
# them takes, some 35 ms each, and the last of N in line waits (N - 1) turns.
TURN_S = 0.5


class Contexts:
    """The contexts of a bundle on a device, as many as there are slots for."""

    def __init__(self, session: Session, bundle: Bundle, policy: str) -> None:
        self._session = session
        self._bundle = bundle
        self._eviction: Eviction[Place] = POLICIES[policy]()
        # Keys that name the same kernel of the same file share a context.
        self._places = {
            ctx: (posixpath.normpath(x.file), x.kernel_name)
            for ctx, x in bundle.manifest.xclbins.items()
        }
        self._loaded: dict[Place, LoadedContext] = {}
        self._slot_wait_s = settings.slot_wait_ms() / 1000
        self._line = line(session.lock_folder)
        self._turn_began = 0.0
        self.taken = 0  # contexts created that replace none of ours

    def __iter__(self) -> Iterator[tuple[Place, LoadedContext]]:
        """What is loaded now, the oldest first."""
        return iter(list(self._loaded.items()))

    def place(self, ctx: str) -> Place:
        """What the context of an xclbin's key is created for."""
        return self._places[ctx]

    def plan(self, keys: Sequence[str]) -> None:
        """A forward begins that needs the contexts of these keys in this order."""
        self._eviction.plan([self._places[ctx] for ctx in keys])

    def use(self, ctx: str) -> LoadedContext:
        """The context of a key, to run in it next; created if need be.

        Others are dropped only if there is no slot for it, one attempt at a time.

        Raises:
            BundleError: its xclbin cannot be used; nothing is dropped then.
            NoFreeContext: others held every slot for as long as may be waited.
        """
        place = self._places[ctx]
        self._give_turn()
        self._eviction.used(place)
        if place not in self._loaded:
            path = self._bundle.xclbin(ctx)
            begins = not self._loaded
            context, dropped = None, 0
            if not (begins and self._line.anyone()):  # who has nothing does not push in
                context, dropped = self._make_room(path, place[1])
            if context is None:
                begins = True
                context = self._wait_in_line(path, place[1], dropped)
            if begins:
                self._turn_began = time.monotonic()
            if not dropped:
                self.taken += 1
            self._loaded[place] = LoadedContext(context)
        return self._loaded[place]

    def _make_room(self, path: Path, kernel_name: str) -> tuple[Context | None, int]:
        """A new context, or None if there is no slot with all of ours dropped; how many were."""
        dropped = 0
        while True:
            try:
                return self._session.context(path, kernel_name), dropped
            except NoFreeContext:
                if call_in():
                    continue
                if not self._loaded:
                    return None, dropped
            dropped += self._drop()

    def _drop(self) -> int:
        """Release the contexts the policy names; how many."""
        victims = self._eviction.victims(list(self._loaded))
        for place in victims:
            log.debug("swap: %s dropped", place[0])
            self._release(place, "swap")
            self._session.counters.swaps += 1
        return len(victims)

    def _wait_in_line(self, path: Path, kernel_name: str, dropped: int) -> Context:
        """A new context once others have given one up.

        Raises:
            NoFreeContext: there is none when the time is up.
        """
        deadline = time.monotonic() + self._slot_wait_s
        with self._line.stand() as place:
            while True:
                # Whoever comes before us needs what idle engines of this process hold, as we do.
                call_in()
                late = time.monotonic() >= deadline  # then try, whoever comes before
                if late or not self._line.anyone(before=place):
                    try:
                        return self._session.context(path, kernel_name)
                    except NoFreeContext as error:
                        if late:
                            raise self._no_context(path, dropped, error) from error
                time.sleep(random.uniform(*RETRY_S))

    def _no_context(self, path: Path, dropped: int, error: NoFreeContext) -> NoFreeContext:
        # The emulated NPU is none of xrt-smi's.
        emulated = self._session.kind == "emulated"
        listed = "" if emulated else ", `xrt-smi examine -r aie-partitions` lists them"
        return NoFreeContext(
            f"{path.name}: no free hardware context after dropping our other {dropped} and waiting "
            f"{self._slot_wait_s:g} s ({self._session.slots_text()}); close other NPU programs"
            f"{listed}, let idle ones release theirs (NPU_EMBED_IDLE_RELEASE_MS), or raise "
            f"NPU_EMBED_SLOT_WAIT_MS. XRT said: {error}"
        )

    def _give_turn(self) -> None:
        """Give our contexts up if we have had our turn and another engine waits with none.

        It has stood in line for one, so it goes first: we stand behind it for our next.
        """
        had_turn = time.monotonic() - self._turn_began >= TURN_S
        if self._loaded and had_turn and self._line.anyone():
            log.debug("%d contexts given up to another engine", self.unload_all("turn"))

    def unload(self, key: str) -> None:
        """Release a kernel by its name, or by an xclbin's key a context and all its kernels.

        A context goes with its last kernel.

        Raises:
            InputError: nothing of that name is loaded.
        """
        if self._places.get(key) in self._loaded:
            self._release(self._places[key], "release")
            return
        for place, loaded in self:
            if loaded.unload(key):
                if not loaded.names():
                    self._release(place, "release")
                return
        names = sorted(name for _, loaded in self for name in loaded.names())
        raise InputError(
            f"unload({key!r}): not loaded; loaded are {', '.join(names) or 'no kernels'}."
        )

    def unload_all(self, why: str = "release") -> int:
        """Release every kernel and context; how many contexts."""
        count = len(self._loaded)
        while self._loaded:
            self._release(next(reversed(self._loaded)), why)
        return count

    def _release(self, place: Place, why: str) -> None:
        loaded = self._loaded.pop(place)
        if events.listeners:
            events.note(
                events.ContextDropped(posixpath.basename(place[0]), why, time.perf_counter())
            )
        loaded.release()
