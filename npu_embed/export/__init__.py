"""Checkpoint folder -> bundle folder, without torch."""

from .exporter import EXPORTER_VERSION, export_checkpoint
from .parts import Progress

__all__ = ["EXPORTER_VERSION", "Progress", "export_checkpoint"]
