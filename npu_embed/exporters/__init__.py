"""Checkpoint folder -> bundle folder, without torch; one file a model family.

Not called `export`: that name in npu_embed is the function's.
"""

from .exporter import EXPORTER_VERSION, export_checkpoint
from .parts import Progress

__all__ = ["EXPORTER_VERSION", "Progress", "export_checkpoint"]
