"""The functions of the package: embed() and the Embedder that its calls share, export()."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from . import settings
from .bf16 import F32
from .embedder import Embedder
from .paths import as_path

try:
    __version__ = metadata.version("npu-embed")
except metadata.PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

# Reentrant, for a signal handler that embeds too.
_lock = threading.RLock()
_shared: dict[tuple[object, ...], Embedder] = {}


def _fresh_lock() -> None:
    """A lock nobody holds: the thread that held it at a fork is not in the child."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_fresh_lock)


def embed(
    texts: str | Iterable[str],
    *,
    bundle: str | Path | None = None,
    device: str | None = None,
    prompt: str | None = None,
    dim: int | None = None,
    truncate: bool = True,
    progress: bool = False,
) -> F32:
    """The vectors of texts, float32 [len(texts), dim] in their order; of one str, [dim].

    They are of unit length where the model's are, as those of the default bundle.

    The first call opens the bundle (the default one is made on first use) and later calls with the
    same bundle and device use it again; an Embedder gives control over that. See Embedder.embed.

    Raises:
        NpuEmbedError: see Embedder and Embedder.embed.
    """
    return shared(bundle, device).embed(texts, prompt, dim, truncate, progress)


def shared(bundle: str | Path | None = None, device: str | None = None) -> Embedder:
    """The Embedder that embed() uses for a bundle and device, opened if it is not yet.

    It belongs to this process, since none survives a fork, and is not for its users to close.

    Raises:
        NpuEmbedError: see Embedder.
    """
    chosen = as_path("bundle", bundle) if bundle is not None else settings.bundle()
    name: object = device if device is not None else settings.device()
    key = (
        None if chosen is None else str(chosen.absolute()),
        settings.check_choice("device", "device", name, settings.DEVICES),
        os.getpid(),
    )
    with _lock:
        if key not in _shared:
            _shared[key] = Embedder(chosen, device)
        return _shared[key]


def export(
    checkpoint: str | Path,
    out: str | Path,
    *,
    force: bool = False,
    target: str = "npu2",
    name: str | None = None,
    attention: str | None = None,
    layout: str = "npu-embed",
) -> Path:
    """The bundle folder `out`, made from a Hugging Face or sentence-transformers checkpoint folder.

    force replaces an existing `out`; target is the NPU generation, npu2 or npu1; name the
    model's, else the checkpoint folder's; attention where it is computed, npu or host, in a family
    that can do either (None: npu); layout the bundle's, "npu-embed" or "published" (as taconite
    reads it, attention on the host).

    Raises:
        BundleError: the checkpoint is damaged, or uses what this engine does not compute.
        InputError: `out` exists, or an argument cannot be used.
    """
    from .exporters import export_checkpoint  # not on the way to the first vector

    return export_checkpoint(
        checkpoint,
        out,
        force=force,
        target=target,
        name=name,
        attention=attention,
        layout=layout,
    )
