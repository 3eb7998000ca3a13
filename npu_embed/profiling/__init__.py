"""Where an Embedder's time goes by kernel and stage; its kernels' results beside the CPU's."""

from .compare import Comparison, compare
from .measure import Profile, profile
from .table import KernelLine, StageLine
from .texts import TEXTS

__all__ = ["TEXTS", "Comparison", "KernelLine", "Profile", "StageLine", "compare", "profile"]
