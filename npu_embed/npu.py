"""Npu: runs a bundle's GEMMs and attentions on a device, as runlists where that can be done."""

from __future__ import annotations

import logging
import posixpath
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from . import events, settings
from .buffers import Buffer
from .bundle import Bundle
from .contexts import Contexts, Place
from .device import Session
from .errors import BundleError, RunFailed
from .eviction import POLICIES
from .flights import Flight, together
from .loaded import LoadedContext
from .rows import Rows
from .runlists import Launch
from .runs import GemmRun, MhaRun, Run, Step
from .specs import GemmSpec, MhaSpec
from .watching import Arrival, Watch, seen

log = logging.getLogger("npu_embed")

# Called with a run and what runs it and waits for its end.
OneByOne: TypeAlias = Callable[[Run, Callable[[], None]], None]

MAX_MADE_OUT = 4  # of two packs in flight, with two kinds of layers


@dataclass(slots=True)
class _MadeOut:
    """Runs of one context with their streams; and the kernels they are launched with.

    launches: by the first run of a part: the context they are loaded in, how many kernels it had
    released then (they may be among those), kernels and views.
    """

    runs: Sequence[Run]
    steps: list[Step]
    streams: list[bytes]
    place: Place
    launches: dict[int, tuple[LoadedContext, int, list[Launch]]] = field(default_factory=dict)


class Npu:
    """Runs the GEMM and MHA kernels of a bundle.

    Contexts are counted in `session.counters`: a *swap* is a context dropped to make room for
    another, a *switch* a run in another context than the one before. Kernels never leave this
    class: a dropped one could not be told from a live one.
    """

    def __init__(
        self,
        session: Session,
        bundle: Bundle,
        *,
        policy: str | None = None,
        runlists: str | None = None,
    ) -> None:
        if session.generation is not None and session.generation != bundle.target:
            raise BundleError(
                f"{bundle.path.name}: kernels for {bundle.target}, this NPU is "
                f"{session.generation} ({session.device_name}); {_remedy(session, bundle)}."
            )
        self.session = session
        self.bundle = bundle
        policy = settings.eviction() if policy is None else policy
        settings.check_choice("policy", "eviction policy", policy, tuple(POLICIES))
        self._contexts = Contexts(session, bundle, policy)
        lists = settings.runlists() if runlists is None else runlists
        settings.check_choice("runlists", "runlists setting", lists, settings.RUNLISTS)
        self._lists = lists != "off" and session.has_runlists
        # Whether a run may read or overwrite what an earlier run of its list wrote is disputed
        # on hardware, so there the first list of each kind is compared with single runs.
        self.check_lists = lists == "auto" and session.kind == "npu"
        self._checked: set[tuple[str, ...]] = set()
        self._last: Place | None = None
        self._made_out: dict[int, _MadeOut] = {}  # by the identity of the runs' tuple
        self._watch = Watch()
        self.one_by_one: OneByOne | None = None  # for who wants to see each run's operands

    def plan(self, contexts: Sequence[str]) -> None:
        """A forward begins that needs the contexts of these xclbin keys in this order."""
        self._contexts.plan(contexts)

    def context_of(self, run: Run) -> Place:
        """What the context of a run is created for; runs of one context may share a submit."""
        return self._contexts.place(self._step(run).spec.ctx)

    def _step(self, run: Run) -> Step:
        return run.step(self.bundle.specs, self.bundle.no_window)

    def submit(self, runs: Sequence[Run]) -> Flight:
        """Start runs of one context in this order, as a runlist where there are several.

        Each may read what an earlier one writes. Between runs of a list the host sees nothing.

        Raises:
            ValueError: no runs, runs of different contexts, or sizes no kernel or buffer has.
            NoFreeContext, RunFailed, DeviceError: from the device; RunFailed also from wait().
        """
        if self.one_by_one is None:
            return self._submit(runs)
        for run in runs:
            self.one_by_one(run, partial(self._run_alone, run))
        return together([])

    def _run_alone(self, run: Run) -> None:
        self._submit([run]).wait()

    def _submit(self, runs: Sequence[Run]) -> Flight:
        counters = self.session.counters
        made, swaps = self._make_out(runs), counters.swaps
        loaded = self._contexts.use(made.steps[0].spec.ctx)
        switched = self._last is not None and self._last != made.place
        counters.switches += switched
        self._last = made.place
        came = switched, counters.swaps > swaps
        flights = []
        try:
            for start in range(0, len(runs), loaded.max_copies):
                part = slice(start, start + loaded.max_copies)
                flights.append(self._submit_part(loaded, runs[part], made, part, came))
                came = False, False
        except BaseException:
            loaded.settle()  # nobody will wait for what was started
            raise
        return together(flights)

    def _make_out(self, runs: Sequence[Run]) -> _MadeOut:
        """Steps and streams of runs, kept for a tuple that is submitted again, as in each layer."""
        kept = self._made_out.get(id(runs))
        if kept is not None and kept.runs is runs:
            return kept
        steps = [self._step(run) for run in runs]
        places = {self._contexts.place(step.spec.ctx) for step in steps}
        if len(places) != 1:
            raise ValueError(f"submit: runs of {len(places)} contexts, wanted one")
        # Files are read and checked before any context is touched: a bad one evicts nothing.
        streams = [self.bundle.stream(step.spec, step.file) for step in steps]
        made = _MadeOut(runs, steps, streams, places.pop())
        if isinstance(runs, tuple):
            while len(self._made_out) >= MAX_MADE_OUT:
                del self._made_out[next(iter(self._made_out))]
            self._made_out[id(runs)] = made
        return made

    def _submit_part(
        self,
        loaded: LoadedContext,
        runs: Sequence[Run],
        made: _MadeOut,
        part: slice,
        came: tuple[bool, bool],
    ) -> Flight:
        """came: switched, swapped; as Arrival has them."""
        steps = made.steps[part]
        found = made.launches.get(part.start)
        if found is None or found[0] is not loaded or found[1] != loaded.released:
            launches = [
                (
                    loaded.plain(step.name, stream)
                    if step.words is None
                    else loaded.copy(step.name, step.words, stream, step.patch()),
                    step.views,
                )
                for step, stream in zip(steps, made.streams[part], strict=True)
            ]
            made.launches[part.start] = loaded, loaded.released, launches
        else:
            launches = found[2]
        as_list = self._lists and len(launches) > 1
        if as_list and self.check_lists:
            kind = _kind(steps)
            if kind not in self._checked:
                self._check_list(loaded, runs, launches)
                self._checked.add(kind)
                as_list = self._lists
        if events.listeners:
            told = [seen(run, step) for run, step in zip(runs, steps, strict=True)]
            arrival = Arrival(posixpath.basename(made.place[0]), *came)
            return self._watch.submit(loaded, launches, told, arrival, as_list=as_list)
        return loaded.submit(launches, as_list=as_list)

    def _check_list(
        self, loaded: LoadedContext, runs: Sequence[Run], launches: Sequence[Launch]
    ) -> None:
        """Run as a list and one by one; where the results differ, do without lists from now on.

        Raises:
            RunFailed: a single run failed.
        """

        def results(*, as_list: bool) -> list[NDArray[np.uint16]]:
            loaded.submit(launches, as_list=as_list).wait()
            found = (run.results() for run in runs)
            return [buffer.bits(rows, row=row) for buffer, row, rows in found]

        try:
            listed = results(as_list=True)
        except RunFailed:
            listed = []
        single = results(as_list=False)
        if len(listed) != len(single) or not all(map(np.array_equal, listed, single)):
            self._lists = False
            log.warning(
                "runlists give other results than single runs on this NPU; doing without them "
                "(NPU_EMBED_RUNLISTS=off says so from the start)"
            )

    def run_gemm(self, key: str, a: Rows, col: int, w: Buffer, c: Rows, rows: int) -> None:
        """Run a GemmRun and wait for its end; raises as submit() does."""
        self.submit([GemmRun(key, a, w, c, rows, col)]).wait()

    def run_mha(
        self,
        qkv: Rows,
        o: Rows,
        rows: int,
        window: int | None = None,
        row: int = 0,
        name: str | None = None,
    ) -> None:
        """Run an MhaRun and wait for its end; raises as submit() does."""
        self.submit([MhaRun(qkv, o, rows, window, row, name)]).wait()

    def loaded(self) -> dict[str, list[str]]:
        """What is loaded now: xclbin file -> the names of its kernels (`qkv_x3`, `mha_64`)."""
        found: dict[str, list[str]] = {}
        for (file, _), loaded in self._contexts:
            found.setdefault(file, []).extend(loaded.names())
        return found

    @property
    def contexts_held(self) -> int:
        """How many hardware contexts are loaded now."""
        return sum(1 for _ in self._contexts)

    @property
    def contexts_taken(self) -> int:
        """How many contexts were created so far that do not replace one dropped to make room."""
        return self._contexts.taken

    def unload(self, key: str) -> None:
        """Release a kernel by its name, or by an xclbin's key a context and all its kernels.

        A context goes with its last kernel. What is unloaded is loaded again at its next use.

        Raises:
            InputError: nothing of that name is loaded.
        """
        self._contexts.unload(key)

    def unload_all(self) -> int:
        """Release every kernel and context, loaded again at their next use; how many contexts."""
        self._made_out.clear()  # it names kernels that are released now
        return self._contexts.unload_all()

    def close(self) -> None:
        """Release every kernel and context."""
        self.unload_all()
        self._last = None


def _remedy(session: Session, bundle: Bundle) -> str:
    """What to do where a bundle's kernels are for another generation.

    A bundle of `npu-embed get` cannot be exported anew as it is: that has no --target.
    """
    export = (
        "export its checkpoint folder with `npu-embed export CHECKPOINT OUT --target "
        f"{session.generation}` and name OUT as the bundle"
    )
    if session.kind != "emulated":
        return export
    return f"set NPU_EMBED_EMU_PROFILE={bundle.target} to emulate the NPU it is for, or {export}"


def _kind(steps: Sequence[Step]) -> tuple[str, ...]:
    """What kind of list these runs are, whatever their sizes: `up down`, `mha`.

    Attention whose buckets write past their texts, where others' results are, is another kind
    than attention that does not.
    """
    stems = [s.spec.key if isinstance(s.spec, GemmSpec) else s.spec.name for s in steps]
    overlap = any(
        isinstance(s.spec, MhaSpec) and s.words is not None and s.words[0] < s.spec.rows
        for s in steps[:-1]
    )
    return (*dict.fromkeys(stems), *(["overlapping"] if overlap else []))
