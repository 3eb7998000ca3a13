"""Runs the command line in this process, as a terminal or a pipe would see it."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from dataclasses import dataclass
from typing import Any
from unittest import mock

from npu_embed.cli import main


class _Stream(io.TextIOWrapper):
    """A text stream that may claim to be a terminal."""

    def __init__(self, content: bytes = b"", *, tty: bool = False) -> None:
        super().__init__(io.BytesIO(content), encoding="utf-8", write_through=True)
        self.tty = tty

    def isatty(self) -> bool:
        return self.tty

    def text(self) -> str:
        """What was written."""
        self.flush()
        self.seek(0)
        return self.read()


@dataclass(frozen=True)
class Result:
    """How a command ended, and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def json_lines(self) -> list[Any]:
        """The values of the lines on stdout."""
        return [json.loads(line) for line in self.out.splitlines()]


def run(*args: object, stdin: bytes = b"", tty: bool = False) -> Result:
    """The result of `npu-embed args`; tty: stdout is a terminal."""
    out, err = _Stream(tty=tty), _Stream()
    code: object = None
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "stdin", _Stream(stdin)),
    ):
        try:
            main([str(arg) for arg in args], prog_name="npu-embed")
        except SystemExit as ending:
            code = ending.code
    assert isinstance(code, int)
    return Result(code, out.text(), err.text())
