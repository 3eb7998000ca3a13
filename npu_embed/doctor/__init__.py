"""The doctor: why an NPU or a bundle does not work on this machine, and what to do about it."""

from .examination import examine
from .findings import Finding

__all__ = ["Finding", "examine"]
