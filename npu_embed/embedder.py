"""Embedder: texts and images -> vectors; a bundle's lifetime on a device, order, statistics."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import overload

import numpy as np

from . import models, seeing, settings
from .bf16 import F32
from .bundle import Bundle
from .canary import image_canary, text_canary
from .device import Counters, Session
from .errors import InputError
from .idle import IdleTimer, lend
from .image_queries import ImageQueries
from .npu import OneByOne
from .packing import Pack, checked_rows, make_packs, noted
from .paths import as_path
from .progress import bar
from .queries import Queries
from .recovery import Kind, Recovery, check_verify
from .schedule import SLOTS
from .stats import Stats, Tally
from .streaming import Streams
from .token_queries import TokenQueries
from .tokenizer import Encoded, as_texts, check_some_tokens, check_text
from .tokenizing import Tokenizing
from .turns import Turns
from .vectors import check_finite, checked_dim, cut


class Embedder(Queries, Streams, TokenQueries, ImageQueries):
    """A bundle loaded on a device.

    bundle: a bundle folder, or a name that `npu-embed get` knows, whose bundle is made on first
    use; None is NPU_EMBED_BUNDLE, else "minilm" (all-MiniLM-L6-v2). device: "auto", "npu",
    "emulated"; None is NPU_EMBED_DEVICE, else "auto". plain_specials: special tokens typed in a
    text ("[SEP]") are plain text. pack_rows: tokens that share a forward at most, None for the
    bundle's limit; fewer take less memory. verify: "startup" embeds something known whenever it
    takes the NPU's contexts, "always" also runs every pack twice, "never" trusts; None is
    NPU_EMBED_VERIFY, else "auto": "startup" on an NPU, "never" on the emulated one. check_hashes:
    read every file of the bundle first and compare it with its sha256.

    What fails on the device is computed once more; docs/faults.md says what is promised.

    May be shared by threads, which take turns; not by processes: open one in each. A signal
    handler that interrupts it can read stats, anything else is an InputError there.
    A context manager; without it, close() frees the device.

    Raises:
        BundleError, DeviceError, FetchError, SettingError: from opening the bundle or the device.
        InputError, InputTypeError: an argument that cannot be used.
    """

    def __init__(
        self,
        bundle: str | Path | None = None,
        device: str | None = None,
        *,
        plain_specials: bool = False,
        pack_rows: int | None = None,
        verify: str | None = None,
        check_hashes: bool = False,
    ) -> None:
        way = settings.verify() if verify is None else check_verify("verify", verify)
        self._closed = True  # until everything below has worked
        self._turns = Turns()
        self._total = Tally()
        self._snapshot = self._last = Tally().stats(Counters())
        path = as_path("bundle", bundle) if bundle is not None else settings.bundle()
        with self._total.timing.stage("open"):
            found = default_bundle() if path is None else bundle_folder(path)
            self._bundle = Bundle.open(found, check_hashes=check_hashes)
            rows = checked_rows(pack_rows, self._bundle.max_tokens, self._bundle.max_rows)
            self._tokenizing = Tokenizing(self._bundle, plain_specials=plain_specials)
            self._session = Session.open(device, array_programs=self._bundle.has_array_programs)
            self._model = models.load(self._session, self._bundle, rows)
        self._recovery = Recovery(self._model.npu, way)
        self._of_texts = Kind(partial(text_canary, self._model, self._bundle))
        self._of_images = Kind(partial(image_canary, self._model, self._bundle))
        self._idle = IdleTimer(settings.idle_release_ms() / 1000, self._release_if_due)
        lend(self._release_if_free)
        self._closed = False

    @property
    def dim(self) -> int:
        """The length of a vector."""
        return self._model.dim

    @property
    def max_tokens(self) -> int:
        """The most tokens of one text, special tokens included; 0 where none can be embedded."""
        return self._bundle.max_tokens

    @property
    def max_rows(self) -> int:
        """The most tokens that share a forward."""
        return self._model.max_rows

    @property
    def device(self) -> str:
        """What it runs on: "npu" or "emulated"."""
        return self._session.kind

    @property
    def bundle(self) -> Bundle:
        """The opened bundle."""
        return self._bundle

    @property
    def plain_specials(self) -> bool:
        """Whether special tokens typed in a text are plain text."""
        return self._tokenizing.plain_specials

    @property
    def contexts_held(self) -> int:
        """How many of the NPU's hardware contexts it holds now; waits for nobody."""
        return self._model.npu.contexts_held

    @property
    def stats(self) -> Stats:
        """What was done since it was opened; a snapshot that waits for nobody.

        While a pack is on the device: what had been done when it got there.
        """
        with self._turns.take_if_free() as free:
            if free:
                self._snapshot = self._total.stats(self._session.counters)
        return self._snapshot

    @property
    def last_stats(self) -> Stats:
        """What the last call of embed that ended did, whichever thread made it."""
        return self._last

    @overload
    def embed(
        self,
        texts: str,
        prompt: str | None = None,
        dim: int | None = None,
        truncate: bool = True,
        progress: bool = False,
    ) -> F32: ...
    @overload
    def embed(
        self,
        texts: Iterable[str],
        prompt: str | None = None,
        dim: int | None = None,
        truncate: bool = True,
        progress: bool = False,
    ) -> F32: ...
    def embed(
        self,
        texts: str | Iterable[str],
        prompt: str | None = None,
        dim: int | None = None,
        truncate: bool = True,
        progress: bool = False,
    ) -> F32:
        """The vectors of texts, float32 [len(texts), dim] in their order; of one str, [dim].

        texts: a list, tuple, array, Series or other iterable of str. prompt: the name of one of
        the bundle's prompts, whose text goes before each text; None is the bundle's default
        prompt, if it has one. dim: keep the first `dim` numbers, scaled to unit length again.
        truncate: cut texts past max_tokens as the reference does, instead of raising. progress:
        draw a bar on a terminal.

        The same call gives the same bits, whatever was embedded before. In the company of other
        texts a text's vector may differ in its last bits, since float32 sums depend on a
        matrix's size.

        Raises:
            InputError, InputTypeError: a text or an argument that cannot be used, by index.
            NoFreeContext, RunFailed, DeviceError: from the device; the next call starts afresh.
        """
        return self._embed(texts, self._bundle.prompt(prompt), dim, truncate, progress)

    def _embed(
        self,
        texts: str | Iterable[str],
        prefix: str,
        dim: int | None,
        truncate: bool,
        progress: bool,
    ) -> F32:
        if isinstance(texts, str):
            row: F32 = self._embed([texts], prefix, dim, truncate, progress)[0]
            return row
        checked_dim(dim, self._model.dim)
        return self._embed_texts(as_texts(texts), prefix, dim, truncate, progress=progress)

    def _embed_texts(
        self,
        texts: list[str],
        prefix: str,
        dim: int | None,
        truncate: bool,
        first: int = 0,
        progress: bool = False,
    ) -> F32:
        keep = checked_dim(dim, self._model.dim)
        call = Tally()
        self._check_usable()
        encoded, part = self._tokenizing.encode(texts, prefix, truncate, first)
        call.add(part)
        with self._turns.take():
            self._total.add(part)
        self._tokenizing.warn_of_cut(encoded, first)
        check_some_tokens(encoded, first)
        vectors = self._run(encoded, progress, call, first)
        self._ended(call)
        return cut(vectors, keep, first=first)

    def tokenize(
        self, texts: str | Iterable[str], prompt: str | None = None, truncate: bool = True
    ) -> list[list[int]]:
        """The token ids of each text as `embed` uses them, special tokens included.

        Raises:
            InputError, InputTypeError: as embed.
        """
        checked = [check_text(texts, "texts")] if isinstance(texts, str) else as_texts(texts)
        prefix = self._bundle.prompt(prompt)
        self._check_usable()
        encoded, _ = self._tokenizing.encode(checked, prefix, truncate)
        return [[int(i) for i in e.ids] for e in encoded]

    def _run(self, encoded: Sequence[Encoded], progress: bool, call: Tally, first: int) -> F32:
        """The model's vectors, in order."""
        out = np.zeros((len(encoded), self._model.dim), dtype=np.float32)
        packs = make_packs([len(e.ids) for e in encoded], self._model.max_rows)
        done = 0
        with bar("embedding", len(encoded), "texts", show=progress) as advance:
            for begin in range(0, len(packs), SLOTS):
                group = packs[begin : begin + SLOTS]
                with noted(group, first):
                    found = self._forward(encoded, group, call)
                for pack, vectors in zip(group, found, strict=True):
                    check_finite(vectors, [first + i for i in pack.indices])
                    out[list(pack.indices)] = vectors
                    done += len(pack.indices)
                    advance(done)
        return out

    def _forward(self, encoded: Sequence[Encoded], group: Sequence[Pack], call: Tally) -> list[F32]:
        """The vectors of packs that are run in step."""
        inputs = [([encoded[i].ids for i in pack.indices], pack) for pack in group]
        with self._turn(call) as part:
            vectors = self._recovery.run(
                self._of_texts,
                lambda: models.forward_together(self._model, inputs, part.timing),
            )
            part.texts = sum(len(pack.indices) for pack in group)
            part.tokens = sum(pack.rows for pack in group)
            part.packs = len(group)
        return vectors

    @contextmanager
    def _turn(self, call: Tally) -> Iterator[Tally]:
        part = Tally()
        with self._turns.take():
            self._check_usable()
            before = self._session.counters.copy()
            self._snapshot = self._total.stats(before)
            try:
                yield part
            finally:
                self._total.add(part)
                self._snapshot = self._total.stats(self._session.counters)
                call.add(part)
                call.counters.add(self._session.counters.since(before))
                self._idle.restart()

    def _ended(self, call: Tally) -> None:
        self._last = call.stats(call.counters)

    def _image_encoder(self) -> models.ImageEncoder | None:
        self._check_usable()
        return models.image_encoder(self._model)

    def _recovered(self, forward: Callable[[], F32]) -> F32:
        return self._recovery.run(self._of_images, forward)

    def run_one_by_one(self, see: OneByOne | None) -> None:
        """Have `see` run every kernel from now on, alone: see(run, start), which calls start().

        For whoever wants to look at a run's operands and results, or (with None) no longer does.
        """
        with self._turns.take():
            self._check_usable()
            self._model.npu.one_by_one = see

    def release(self) -> None:
        """Give the hardware contexts back to other programs; the next call takes them again.

        What was loaded stays: bundle, weights and buffers. NPU_EMBED_IDLE_RELEASE_MS does this
        by itself. A device that counted as bad (DeviceBad) is tried again after it.
        """
        with self._turns.take():
            self._check_usable()
            self._model.npu.unload_all()
            self._recovery.forgive()

    def _release_if_due(self) -> None:
        """Release the contexts unless somebody has embedded since; for the timer's thread."""
        with self._turns.take():
            if self._idle.due() and not self._closed:
                self._model.npu.unload_all()

    def _release_if_free(self) -> int:
        """Release the contexts if nobody is embedding; how many. For a sibling that needs one.

        It never waits, so that siblings that need each other's contexts cannot lock each other out.
        """
        with self._turns.take_if_free() as free:
            return self._model.npu.unload_all() if free and not self._closed else 0

    def _check_usable(self) -> None:
        if self._closed:
            raise InputError("this Embedder is closed; open another one.")
        self._turns.check_process()

    def close(self) -> None:
        """Free the device and the bundle; may be called twice."""
        if self._turns.forked:
            return  # the device is the parent's
        with self._turns.take():
            if not self._closed:
                self._closed = True
                self._idle.stop()
                self._model.close()
                self._bundle.close()
                seeing.write_trace()

    def __enter__(self) -> Embedder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def default_bundle() -> Path:
    """The folder of the default bundle, all-MiniLM-L6-v2, made on first use.

    Raises:
        FetchError: its checkpoint could not be had.
    """
    from . import fetch

    return _made(fetch.DEFAULT_RECIPE)


def bundle_folder(name: str | Path) -> Path:
    """The folder of a bundle's name: one of that name, or where there is none, a recipe's.

    A recipe's bundle is made on first use. What is neither is returned as it is.

    Raises:
        FetchError: the recipe's checkpoint could not be had.
    """
    if os.path.lexists(name):
        return Path(name)  # without the exporter, which `fetch` imports
    from . import fetch

    return _made(str(name)) if str(name) in fetch.recipe_names() else Path(name)


def _made(recipe: str) -> Path:
    from . import fetch
    from .progress import stages

    with stages(show=True) as progress:
        return fetch.get(recipe, progress=progress)
