"""Engines in processes of their own: started, asked, ended; what they said where they failed."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import report

import npu_embed

WORKER = Path(__file__).resolve().with_name("worker.py")
OURS = "npu-embed"
Answer = dict[str, Any]


class EngineFailed(Exception):
    """An engine cannot run; the message is the reason, in its own last words."""


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine with its model, in the environment it runs in.

    name: in tables. loader: its name in engines.ENGINES. settings: what is tried to find its best
    (texts a batch, tokens a pack); without any, it runs with its default.
    """

    name: str
    loader: str
    python: str
    model: str
    settings: tuple[int | None, ...] = ()

    def environment(self) -> dict[str, str]:
        """No BLAS overrides, no network; for ours, the npu_embed of this process."""
        environment = {**report.plain_environment(), "HF_HUB_OFFLINE": "1"}
        if self.loader == OURS:
            imported_from = str(Path(npu_embed.__file__).parents[1])
            paths = [imported_from, *filter(None, [environment.get("PYTHONPATH")])]
            environment["PYTHONPATH"] = os.pathsep.join(paths)
        return environment


class Process:
    """A running engine; a context manager that ends it.

    started: time.perf_counter() when the process was started.

    Raises:
        EngineFailed: from every question, if the process ended instead of answering.
    """

    def __init__(self, engine: Engine, texts: Path, setting: int | None = None) -> None:
        self.engine = engine
        # Its words are shown only if it fails: libraries talk much while they load.
        self._words = tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace")
        command = [engine.python, str(WORKER), engine.loader, engine.model, str(texts)]
        self.started = time.perf_counter()
        try:
            self._process = subprocess.Popen(
                [*command, json.dumps(setting)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._words,
                text=True,
                encoding="utf-8",
                env=engine.environment(),
            )
        except OSError as error:
            self._words.close()
            raise EngineFailed(f"{engine.python}: {error.strerror}") from error

    def ready(self) -> Answer:
        """What it says once its model is loaded."""
        return self._answer()

    def ask(self, do: str, **arguments: object) -> Answer:
        """The answer to a command of worker.py."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it ended: the missing answer says so, with the reason
        return self._answer()

    def _answer(self) -> Answer:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise EngineFailed(self._last_words() or f"its process ended with code {code}")
        told: Answer = json.loads(line)
        return told

    def _last_words(self) -> str:
        """The last line it wrote to stderr: an exception's, where Python raised one."""
        self._words.seek(0)
        lines = [line.strip() for line in self._words if line.strip()]
        return lines[-1] if lines else ""

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._process.terminate()
        try:
            self._process.communicate()
        except BrokenPipeError:
            self._process.wait()
        self._words.close()
