"""npu-embed on the emulated NPU beside sentence-transformers with its defaults, on one corpus.

    python benchmarks/versus.py
    python benchmarks/versus.py --corpus texts.txt --rounds 5

Each engine has a process of its own and they take turns: a busy machine slows both, and the ratio
is taken round by round. Both run the same checkpoint, the peer in float32, npu-embed as its NPU
would (bf16 operands, float32 sums). Timed: texts to vectors, tokenization included. Not timed:
starting the process, loading the model, a warm-up of 64 texts.

The peer is installed into benchmarks/.venv on first use, by pip and at pinned versions.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import corpus
import numpy as np
import report
from report import Spread

from npu_embed import NpuEmbedError, fetch
from npu_embed.bundle import Bundle

HERE = Path(__file__).resolve().parent
WORKER = HERE / "worker.py"
PEER_VENV = HERE / ".venv"
CHECKPOINT = HERE / "results" / "checkpoint"
PEER = "sentence-transformers"
OURS = "npu-embed"
# Pinned: the peer must not change between two measurements.
PEER_PACKAGES = ("torch==2.13.0", "sentence-transformers==6.2.0")
RECIPE = fetch.DEFAULT_RECIPE


@dataclass(frozen=True, slots=True)
class Agreement:
    """How alike the two engines' vectors are: cosines of the same text's vectors, texts finite."""

    cosine_min: float
    cosine_mean: float
    finite: bool


class Worker:
    """An engine in its own process; a context manager that ends it.

    Raises:
        SystemExit: the process ended instead of answering; its words are on stderr.
    """

    def __init__(self, python: str | Path, engine: str, model: str | Path, texts: Path) -> None:
        self.engine = engine
        self._process = subprocess.Popen(
            [str(python), str(WORKER), engine, str(model), str(texts)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=_environment(engine),
        )

    def answer(self) -> dict[str, Any]:
        """The next line the process says."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise SystemExit(
                f"{self.engine}: its process ended with code {code}, wanted an answer."
            )
        told: dict[str, Any] = json.loads(line)
        return told

    def ask(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._process.terminate()
        self._process.communicate()


def _environment(engine: str) -> dict[str, str]:
    """A worker's environment: no BLAS overrides, no network, for ours the npu_embed of this one."""
    environment = {**report.plain_environment(), "HF_HUB_OFFLINE": "1"}
    if engine == OURS:
        imported_from = str(Path(fetch.__file__).parents[1])
        paths = [imported_from, *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


def peer_python(folder: Path = PEER_VENV) -> Path:
    """The Python of the peer's environment, made now if it is not there whole.

    Raises:
        SystemExit: pip failed; its words are on stderr.
    """
    python = folder / "bin" / "python"
    done = folder / "installed.txt"  # written last: an interrupted install is made anew
    wanted = "\n".join(PEER_PACKAGES) + "\n"
    if python.exists() and done.is_file() and done.read_text(encoding="utf-8") == wanted:
        return python
    sys.stderr.write(f"installing {', '.join(PEER_PACKAGES)} into {folder}\n")
    venv.create(folder, with_pip=True, symlinks=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # pip's own output must not get between the JSON lines.
    if subprocess.run([*pip, *PEER_PACKAGES], stdout=sys.stderr).returncode:
        raise SystemExit(f"pip could not install {', '.join(PEER_PACKAGES)} into {folder}.")
    done.write_text(wanted, encoding="utf-8")
    return python


def agreement(ours: Path, peers: Path) -> Agreement:
    """The agreement of two files of vectors, float32 [texts, dim]."""
    a, b = (np.load(path).astype(np.float64) for path in (ours, peers))
    cosines = (a * b).sum(axis=1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))
    finite = bool(np.isfinite(a).all() and np.isfinite(b).all())
    return Agreement(round(float(cosines.min()), 6), round(float(cosines.mean()), 7), finite)


def summary(
    rounds: Mapping[str, Sequence[Mapping[str, float]]], texts: int, tokens: int
) -> dict[str, Any]:
    """Medians and ranges by engine, and how many times the peer's speed ours is, by round."""
    engines = {}
    for engine, done in rounds.items():
        seconds = [r["seconds"] for r in done]
        engines[engine] = {
            "seconds": Spread.of(seconds),
            "cpu_seconds": Spread.of(r["cpu_seconds"] for r in done),
            "texts_per_s": Spread.of((texts / s for s in seconds), 2),
            "tokens_per_s": Spread.of((tokens / s for s in seconds), 1),
        }
    ratio = Spread.of(
        peer["seconds"] / own["seconds"]
        for peer, own in zip(rounds[PEER], rounds[OURS], strict=True)
    )
    return {"engines": engines, "times_peer": ratio}


def run(workers: Sequence[Worker], number: int) -> dict[str, list[dict[str, float]]]:
    """Rounds by engine. Every second round runs the engines in the other order."""
    rounds: dict[str, list[dict[str, float]]] = {worker.engine: [] for worker in workers}
    for i in range(number):
        for worker in workers if i % 2 == 0 else reversed(workers):
            told = worker.ask({"run": True})
            rounds[worker.engine].append(told)
            report.line({"benchmark": "versus", "round": i + 1, "engine": worker.engine, **told})
    return rounds


def show(found: Mapping[str, Any]) -> None:
    """The summary as a table."""
    rows = [
        (name, str(e["seconds"]), str(e["texts_per_s"]), str(e["tokens_per_s"]))
        for name, e in found["engines"].items()
    ]
    sys.stderr.write("\n")
    report.table(("engine", "s", "texts/s", "tokens/s"), rows)
    a = found["agreement"]
    sys.stderr.write(
        f"\n{OURS} is {found['times_peer']} times as fast as {PEER} (batch 32); median and range "
        f"of {found['rounds']} rounds\ncosine of the two: at least {a.cosine_min}, mean "
        f"{a.cosine_mean}\n"
    )


def compare(
    texts: Sequence[str], bundle: Path, checkpoint: Path, rounds: int, python: Path
) -> dict[str, Any]:
    """Run both engines; print a line a round, give the summary."""
    tokenizer = Bundle.open(bundle).open_tokenizer()
    about = corpus.describe(texts, [len(e.ids) for e in tokenizer.encode_batch(texts)])
    with tempfile.TemporaryDirectory() as scratch:
        listed = Path(scratch, "corpus.jsonl")
        corpus.write(texts, listed)
        saved = {name: Path(scratch, f"{name}.npy") for name in (PEER, OURS)}
        with (
            Worker(python, PEER, checkpoint, listed) as peer,
            Worker(sys.executable, OURS, bundle, listed) as ours,
        ):
            workers = (peer, ours)
            ready = [worker.answer() for worker in workers]
            done = run(workers, rounds)
            for worker in workers:
                worker.ask({"save": str(saved[worker.engine])})
        alike = agreement(saved[OURS], saved[PEER])
    return {
        "benchmark": "versus",
        "summary": True,
        "rounds": rounds,
        **summary(done, about.texts, about.tokens),
        "agreement": alike,
        "ready": ready,
        "corpus": about,
        "machine": report.machine(),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run the comparison from a command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    corpus.add_arguments(parser)
    parser.add_argument(
        "--bundle", help="a bundle; needs --checkpoint. Default: the default bundle"
    )
    parser.add_argument("--checkpoint", help="the folder the bundle was exported from")
    parser.add_argument("--rounds", type=corpus.positive, default=3, metavar="N")
    parser.add_argument("--peer-python", help="a Python that has the peer; default: made")
    parser.add_argument("--json", action="store_true", help="JSON lines only, no table")
    parser.add_argument("--plot", metavar="OUT.png", help="draw the speeds (needs matplotlib)")
    args = parser.parse_args(argv)
    if args.bundle and not args.checkpoint:
        parser.error("--bundle needs --checkpoint: both engines must run the same weights.")
    texts = corpus.chosen(args)
    python = Path(args.peer_python) if args.peer_python else peer_python()
    try:
        bundle = Path(args.bundle) if args.bundle else fetch.get(RECIPE)
        checkpoint = Path(args.checkpoint or CHECKPOINT)
        if not args.checkpoint and not checkpoint.is_dir():
            fetch.checkpoint(RECIPE, checkpoint)
        found = compare(texts, bundle, checkpoint, args.rounds, python)
    except NpuEmbedError as error:
        raise SystemExit(str(error)) from error
    report.line(found)
    if not args.json:
        show(found)
    if args.plot:
        import plots  # matplotlib is an extra

        plots.engines(found, args.plot)


if __name__ == "__main__":
    main()
