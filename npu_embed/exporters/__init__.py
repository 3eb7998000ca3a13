"""Checkpoint folder -> bundle folder, without torch.

Calling this package is calling npu_embed.export(): Python binds the name `export` in npu_embed to
the package as soon as anything in it is imported, so the name must work as both.
"""

import sys
from pathlib import Path
from types import ModuleType

from .exporter import EXPORTER_VERSION, export_checkpoint
from .parts import Progress

__all__ = ["EXPORTER_VERSION", "Progress", "export_checkpoint"]


class _CallablePackage(ModuleType):
    def __call__(
        self,
        checkpoint: str | Path,
        out: str | Path,
        *,
        force: bool = False,
        target: str = "npu2",
        name: str | None = None,
        attention: str = "npu",
    ) -> Path:
        """See npu_embed.export."""
        return export_checkpoint(
            checkpoint, out, force=force, target=target, name=name, attention=attention
        )


sys.modules[__name__].__class__ = _CallablePackage
