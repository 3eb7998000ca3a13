"""What every adapter holds: which engine it embeds with, and how."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import api, settings
from ..bf16 import F32
from ..embedder import Embedder
from ..errors import InputError, InputTypeError
from ..paths import as_path

# What stands for the bundle's name where none is given: the default bundle is opened only later.
DEFAULT_NAME = "all-MiniLM-L6-v2"


@dataclass(frozen=True, slots=True)
class Engine:
    """Texts -> vectors, as queries or as documents, by an Embedder that is named or given.

    bundle is an absolute path or a recipe's name, None the default bundle. Pickled, it is its
    names: an Embedder that was given stays behind, and its bundle is opened there.
    """

    bundle: str | None = None
    device: str | None = None
    query_prompt: str | None = None
    document_prompt: str | None = None
    dim: int | None = None
    truncate: bool = True
    embedder: Embedder | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        bundle: str | Path | None,
        device: str | None,
        embedder: Embedder | None,
        query_prompt: str | None,
        document_prompt: str | None,
        dim: int | None,
        truncate: bool,
    ) -> Engine:
        """The engine of an adapter's arguments; see npu_embed.integrations.

        Raises:
            InputError, InputTypeError: an argument cannot be used, or names an engine beside the
                Embedder that is given.
            SettingError: there is no such device.
        """
        if embedder is not None:
            if not isinstance(embedder, Embedder):
                raise InputTypeError(
                    f"embedder: {type(embedder).__name__}, wanted an Embedder; a bundle's folder "
                    "goes to bundle."
                )
            if bundle is not None or device is not None:
                raise InputError(
                    "embedder=...: a bundle or device as well, wanted one or the other; leave out "
                    "bundle and device, which the Embedder has."
                )
            bundle, device = embedder.bundle.path, embedder.device
        elif bundle is None:
            bundle = settings.bundle()  # the path, so that it is the same where it is unpickled
        if device is not None:
            settings.check_choice("device", "device", device, settings.DEVICES)
        path = None if bundle is None else _kept_name(as_path("bundle", bundle))
        return cls(path, device, query_prompt, document_prompt, dim, truncate, embedder)

    def open(self) -> Embedder:
        """The Embedder, opened if it is named and not open yet in this process.

        Raises:
            NpuEmbedError: see Embedder.
        """
        return self.embedder or api.shared(self.bundle, self.device)

    def queries(self, texts: Iterable[str]) -> F32:
        """The vectors of what is searched for, float32 [len(texts), dim].

        Raises:
            NpuEmbedError: see Embedder and Embedder.embed.
        """
        embedder = self.open()
        if self.query_prompt is None:
            return embedder.embed_query(texts, self.dim, self.truncate)
        return embedder.embed(texts, self.query_prompt, self.dim, self.truncate)

    def documents(self, texts: Iterable[str]) -> F32:
        """The vectors of what is searched in, float32 [len(texts), dim].

        Raises:
            NpuEmbedError: see Embedder and Embedder.embed.
        """
        embedder = self.open()
        if self.document_prompt is None:
            return embedder.embed_document(texts, self.dim, self.truncate)
        return embedder.embed(texts, self.document_prompt, self.dim, self.truncate)

    @property
    def name(self) -> str:
        """The model's name where the bundle is open, else its folder's; opens nothing."""
        if self.embedder is not None:
            return self.embedder.bundle.name
        return DEFAULT_NAME if self.bundle is None else Path(self.bundle).name

    def names(self) -> dict[str, Any]:
        """The arguments that make this engine again, in this process or another one.

        Raises:
            InputError: it was given an Embedder that a bundle and a device do not say all of.
        """
        if self.embedder is not None and self.embedder.plain_specials:
            raise InputError(
                "embedder=...: plain_specials=True, wanted an Embedder that its bundle's path says "
                "all of to pickle or serialize; make the adapter where it is used."
            )
        return {
            "bundle": self.bundle,
            "device": self.device,
            "query_prompt": self.query_prompt,
            "document_prompt": self.document_prompt,
            "dim": self.dim,
            "truncate": self.truncate,
        }

    def __reduce__(self) -> tuple[object, ...]:
        """Pickled as its names."""
        return Engine, tuple(self.names().values())


def text_of(text: object) -> list[str]:
    """[text], for one text where a framework asks for one at a time.

    Raises:
        InputTypeError: it is not a str.
    """
    if not isinstance(text, str):
        raise InputTypeError(f"text: {type(text).__name__}, wanted str; pass one text.")
    return [text]


def _kept_name(bundle: Path) -> str:
    """A folder wherever it is unpickled; what is none here may be a recipe's name, and stays."""
    return str(bundle.absolute() if os.path.lexists(bundle) else bundle)
