"""Text embeddings on AMD XDNA NPUs, and on an emulated NPU where there is none.

import npu_embed
vectors = npu_embed.embed(["two cats on a sofa", "a red car"])   # float32 [2, 384], unit rows
"""

from __future__ import annotations

from .api import __version__, embed, export
from .embedder import Embedder
from .errors import (
    BundleError,
    DeviceBad,
    DeviceError,
    FetchError,
    InputError,
    InputTypeError,
    NoFreeContext,
    NpuEmbedError,
    OutputError,
    RunFailed,
    SettingError,
)
from .stats import Stats

__all__ = [
    "BundleError",
    "DeviceBad",
    "DeviceError",
    "Embedder",
    "FetchError",
    "InputError",
    "InputTypeError",
    "NoFreeContext",
    "NpuEmbedError",
    "OutputError",
    "RunFailed",
    "SettingError",
    "Stats",
    "__version__",
    "embed",
    "export",
]
