"""pyxrt.runlist: runs of one context, submitted and waited for as one."""

from __future__ import annotations

from . import ert
from .hardware import Chain
from .pyxrt_device import hw_context
from .pyxrt_run import run
from .pyxrt_xclbin import INVALID_ARGUMENT


class runlist:
    """Runs of one context, executed in order of add and waited for as one."""

    def __init__(self, context: hw_context | None = None) -> None:
        if context is not None and not isinstance(context, hw_context):
            raise TypeError("__init__(): incompatible constructor arguments.")
        self._hw_context = context
        self._runs: list[run] = []
        self._executing = False

    def _idle(self, doing: str) -> None:
        if self._hw_context is None:
            raise RuntimeError(
                f"cannot add run object to uninitialized runlist: {INVALID_ARGUMENT}"
            )
        if self._executing:
            raise RuntimeError(
                f"runlist must be idle before {doing}, current state: running: {INVALID_ARGUMENT}"
            )

    def add(self, member: run) -> None:
        """Append a run; it belongs to this list from now on."""
        self._idle("adding run objects")
        if not isinstance(member, run):
            raise TypeError("add(): incompatible function arguments.")
        if member._of()._hw_context is not self._hw_context:
            raise RuntimeError(f"runlist hwctx does not match run hwctx: {INVALID_ARGUMENT}")
        if member._in_runlist:
            raise RuntimeError(f"Run object already added: {INVALID_ARGUMENT}")
        member._in_runlist = True
        self._runs.append(member)

    def execute(self) -> None:
        """Submit all runs."""
        self._idle("submitting for execution")
        if not self._runs:
            raise RuntimeError(f"No runs to execute: {INVALID_ARGUMENT}")
        chain = Chain()
        self._executing = True  # from here on: what an interrupt leaves can be waited for
        try:
            for member in self._runs:
                member._submit(chain)
        except RuntimeError:
            self._executing = False
            raise

    def wait(self) -> None:
        """Wait for all; raises if one fails, and those after it are aborted."""
        if not self._executing:
            return
        states = [member.wait() for member in self._runs]
        self._executing = False  # not before: an interrupted wait may be called again
        failed = next((s for s in states if int(s) != ert.COMPLETED), None)
        if failed is not None:
            raise RuntimeError(f"runlist failed execution ({failed.name})")

    def __del__(self) -> None:
        for member in getattr(self, "_runs", ()):
            member._in_runlist = False
