"""Embedder: texts -> vectors; owns a bundle's lifetime on a device, order and statistics."""

from __future__ import annotations

import logging
import operator
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from . import models, settings
from .bf16 import F32
from .bundle import Bundle
from .device import Counters, Session
from .errors import DeviceError, InputError, InputTypeError
from .hostops import unit_rows
from .packing import make_packs
from .progress import bar
from .tokenizer import Encoded, as_texts, check_text
from .trace import Timing

log = logging.getLogger("npu_embed")

TOKENIZE_TEXTS = 4096  # tokenized at a time: bounds memory, and lets a bar move


@dataclass(frozen=True, slots=True)
class Stats:
    """What an Embedder did since it was opened.

    tokens: computed, special tokens included. truncated: texts cut. counters: runs, switches,
    swaps, loads, patches, syncs, bytes_to_device, bytes_from_device; opening the bundle
    included. seconds: wall time a stage.
    """

    texts: int
    tokens: int
    truncated: int
    packs: int
    counters: Counters
    seconds: dict[str, float]

    def __getattr__(self, name: str) -> int:
        """A counter by its name: stats.swaps is stats.counters.swaps."""
        if name in Counters.__slots__:
            value: int = getattr(self.counters, name)
            return value
        raise AttributeError(f"Stats has no {name!r}")

    def as_dict(self) -> dict[str, Any]:
        """All of it, flat, as JSON wants it."""
        flat: dict[str, Any] = {
            "texts": self.texts,
            "tokens": self.tokens,
            "truncated": self.truncated,
            "packs": self.packs,
        }
        flat.update({name: getattr(self.counters, name) for name in Counters.__slots__})
        flat["seconds"] = {stage: round(s, 6) for stage, s in self.seconds.items()}
        return flat


@dataclass(slots=True)
class _Totals:
    texts: int = 0
    tokens: int = 0
    truncated: int = 0
    packs: int = 0
    timing: Timing = field(default_factory=Timing)


class Embedder:
    """A bundle loaded on a device.

    bundle: a bundle folder; None is NPU_EMBED_BUNDLE, else the default bundle (all-
    MiniLM-L6-v2), which is made on first use. device: "auto", "npu", "emulated"; None is
    NPU_EMBED_DEVICE, else "auto". plain_specials: special tokens typed in a text ("[SEP]") are
    plain text. pack_rows: tokens that share a forward at most, None for the bundle's limit;
    fewer take less memory.

    May be shared by threads, which take turns; not by processes: open one in each.
    A context manager; without it, close() frees the device.

    Raises:
        BundleError, DeviceError, FetchError, SettingError: from opening the bundle or the device.
    """

    def __init__(
        self,
        bundle: str | Path | None = None,
        device: str | None = None,
        *,
        plain_specials: bool = False,
        pack_rows: int | None = None,
    ) -> None:
        self._closed = True  # until everything below has worked
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._totals = _Totals()
        path = Path(bundle) if bundle is not None else settings.bundle()
        with self._totals.timing.stage("open"):
            self._bundle = Bundle.open(default_bundle() if path is None else path)
            rows = _checked_rows(pack_rows, self._bundle)
            self._tokenizer = self._bundle.open_tokenizer(plain_specials=plain_specials)
            self._session = Session.open(device, array_programs=self._bundle.has_array_programs)
            self._model = models.load(self._session, self._bundle, rows)
        self._warned = False
        self._closed = False

    @property
    def dim(self) -> int:
        """The length of a vector."""
        return self._model.dim

    @property
    def max_tokens(self) -> int:
        """The most tokens of one text, special tokens included."""
        return self._bundle.max_tokens

    @property
    def device(self) -> str:
        """What it runs on: "npu" or "emulated"."""
        return self._session.kind

    @property
    def bundle(self) -> Bundle:
        """The opened bundle."""
        return self._bundle

    @property
    def stats(self) -> Stats:
        """What was done so far; a snapshot."""
        with self._lock:
            t = self._totals
            return Stats(
                t.texts,
                t.tokens,
                t.truncated,
                t.packs,
                self._session.counters.copy(),
                dict(t.timing.seconds),
            )

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
        if isinstance(texts, str):
            row: F32 = self.embed([texts], prompt, dim, truncate, progress)[0]
            return row
        keep = _checked_dim(dim, self._model.dim)
        encoded = self._encode(as_texts(texts), prompt, truncate)
        vectors = self._run(encoded, progress)
        if keep < vectors.shape[1]:
            vectors = unit_rows(vectors[:, :keep])
        return vectors

    def tokenize(
        self, texts: str | Iterable[str], prompt: str | None = None, truncate: bool = True
    ) -> list[list[int]]:
        """The token ids of each text as `embed` uses them, special tokens included.

        Raises:
            InputError, InputTypeError: as embed.
        """
        checked = [check_text(texts, "texts")] if isinstance(texts, str) else as_texts(texts)
        return [
            [int(i) for i in e.ids] for e in self._encode(checked, prompt, truncate, count=False)
        ]

    def _encode(
        self, texts: Sequence[str], prompt: str | None, truncate: bool, *, count: bool = True
    ) -> list[Encoded]:
        self._check_usable()
        if not isinstance(truncate, bool):
            raise InputTypeError(f"truncate={truncate!r}: wanted True or False.")
        prefix = self._bundle.prompt(prompt)
        timing = Timing()
        encoded: list[Encoded] = []
        with timing.stage("tokenize"):
            for first in range(0, len(texts), TOKENIZE_TEXTS):
                encoded += self._tokenizer.encode_batch(
                    texts[first : first + TOKENIZE_TEXTS],
                    prompt=prefix,
                    truncate=truncate,
                    first=first,
                )
        cut = [i for i, e in enumerate(encoded) if e.truncated]
        if count:
            with self._lock:
                self._totals.timing.add("tokenize", timing.total())
                self._totals.truncated += len(cut)
                warn, self._warned = bool(cut) and not self._warned, self._warned or bool(cut)
            if warn:
                log.warning(
                    "texts[%d]: %d tokens, cut to %d%s; said once, stats.truncated counts",
                    cut[0],
                    encoded[cut[0]].tokens,
                    self.max_tokens,
                    f" (and {len(cut) - 1} more texts)" if len(cut) > 1 else "",
                )
        return encoded

    def _run(self, encoded: Sequence[Encoded], progress: bool) -> F32:
        """The model's vectors, in order."""
        out = np.zeros((len(encoded), self._model.dim), dtype=np.float32)
        packs = make_packs([len(e.ids) for e in encoded], self._model.max_rows)
        done = 0
        with bar("embedding", len(encoded), "texts", show=progress) as advance:
            for pack in packs:
                with self._lock:
                    self._check_usable()
                    timing = Timing()
                    try:
                        vectors = self._model.forward(
                            [encoded[i].ids for i in pack.indices], pack, timing
                        )
                    finally:
                        for stage, seconds in timing.seconds.items():
                            self._totals.timing.add(stage, seconds)
                    self._totals.texts += len(pack.indices)
                    self._totals.tokens += pack.rows
                    self._totals.packs += 1
                _check_finite(vectors, pack.indices)
                out[list(pack.indices)] = vectors
                done += len(pack.indices)
                advance(done)
        return out

    def _check_usable(self) -> None:
        if self._closed:
            raise InputError("this Embedder is closed; open another one.")
        if self._pid != os.getpid():
            raise DeviceError(
                f"this Embedder was opened in process {self._pid}, this is {os.getpid()}: a device "
                "does not survive a fork; open an Embedder in each process."
            )

    def close(self) -> None:
        """Free the device and the bundle; may be called twice."""
        if self._pid != os.getpid():
            return  # the device is the parent's, and a thread of the parent may hold the lock
        with self._lock:
            if not self._closed:
                self._closed = True
                self._model.close()
                self._bundle.close()

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
    from . import fetch  # the exporter is not needed once the bundle is there
    from .progress import stages

    with stages(show=True) as progress:
        return fetch.get(progress=progress)


def _checked_dim(dim: object, whole: int) -> int:
    """Dim as an int from 1 to whole; None is whole."""
    if dim is None:
        return whole
    try:
        value = operator.index(dim) if not isinstance(dim, bool | np.bool_) else None  # type: ignore[arg-type]
    except TypeError:
        value = None
    if value is None:
        raise InputTypeError(
            f"dim={dim!r}: {type(dim).__name__}, wanted an integer from 1 to {whole}."
        )
    if not 1 <= value <= whole:
        raise InputError(f"dim={value}: wanted 1 to {whole}.")
    return value


def _checked_rows(pack_rows: int | None, bundle: Bundle) -> int:
    if pack_rows is None:
        return bundle.max_rows
    if isinstance(pack_rows, bool) or not isinstance(pack_rows, int):
        raise InputTypeError(f"pack_rows={pack_rows!r}: wanted an integer.")
    if not bundle.max_tokens <= pack_rows <= bundle.max_rows:
        raise InputError(
            f"pack_rows={pack_rows}: wanted {bundle.max_tokens} (the longest text) to "
            f"{bundle.max_rows}."
        )
    return pack_rows


def _check_finite(vectors: NDArray[np.float32], indices: Sequence[int]) -> None:
    """A vector with a NaN or an infinity is never returned."""
    finite = np.isfinite(vectors).all(axis=1)
    if not finite.all():
        index = indices[int(np.argmin(finite))]
        raise DeviceError(
            f"texts[{index}]: its vector is not finite; nothing is returned. Run `npu-embed check` "
            "on the bundle to see which stage fails."
        )
