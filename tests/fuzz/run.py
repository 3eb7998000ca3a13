"""Fuzz a parser: `PYTHONPATH=tests python -m fuzz.run TARGET [--seconds N]`.

With atheris where it is installed, which is guided by coverage; else with random changes. A finding
ends it with an exit code other than 0, and its input is kept in the folder --findings. The target
`runs` computes in machine code where llvmlite is installed; the others by numpy alone.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import logging
import os
import random
import sys
import tempfile
from pathlib import Path

from fuzz.json_changes import changed

SEEDS = Path(__file__).with_name("seeds")
MEMORY_MB = 4096
HANG_SECONDS = 60


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers; 0: any")
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"))
    parser.add_argument("--plain", action="store_true", help="without atheris")
    parser.add_argument("--replay", type=Path, help="an input to run once, instead of fuzzing")
    return parser.parse_args()


def _with_atheris(options: argparse.Namespace) -> None:
    import atheris

    # Its findings are its own files; inputs that reach new code are kept beside the seeds' copies.
    with atheris.instrument_imports(include=["npu_embed"]):
        from fuzz.targets import TARGETS
    with tempfile.TemporaryDirectory() as found:
        limits = [
            f"-max_total_time={options.seconds}",
            f"-timeout={HANG_SECONDS}",
            f"-rss_limit_mb={MEMORY_MB}",
            "-max_len=65536",
            # Half a JSON file reaches as much code as the whole, and has nothing to change in it.
            "-keep_seed=1",
            "-len_control=0",
            f"-artifact_prefix={options.findings}/{options.target}-",
            *([f"-seed={options.seed}"] if options.seed else []),
        ]
        arguments = [sys.argv[0], *limits, found, str(SEEDS / options.target)]

        def mutator(data: bytes, max_size: int, seed: int) -> bytes:
            """Every other change is one that leaves JSON what it is."""
            other = changed(random.Random(seed), data) if seed % 2 else None
            if other is not None and len(other) <= max_size:
                return other
            mutated: bytes = atheris.Mutate(data, max_size)
            return mutated

        atheris.Setup(arguments, TARGETS[options.target], custom_mutator=mutator)
        atheris.Fuzz()


def _without(options: argparse.Namespace) -> None:
    from fuzz.mutate import fuzz
    from fuzz.targets import TARGETS

    def keep(data: bytes) -> None:
        name = f"{options.target}-{hashlib.sha256(data).hexdigest()[:16]}"
        (options.findings / name).write_bytes(data)
        sys.stderr.write(f"{options.findings / name}: a finding\n")

    seeds = [path.read_bytes() for path in sorted((SEEDS / options.target).iterdir())]
    seed = options.seed or int.from_bytes(os.urandom(4), "little")
    count = fuzz(TARGETS[options.target], seeds, options.seconds, seed, keep)
    sys.stdout.write(f"{options.target}: {count} inputs, no finding (seed {seed}, no coverage)\n")


def main() -> None:
    """Fuzz as the command line says."""
    options = _options()
    # What is fuzzed is small: threads would only wait for each other, and refusals are no news.
    # Only `runs` is about what computes; the others would wait for it to be compiled.
    compiled = "auto" if options.target == "runs" else "off"
    os.environ.update(OPENBLAS_NUM_THREADS="1", NPU_EMBED_COMPILED=compiled)
    logging.disable(logging.CRITICAL)
    options.findings.mkdir(parents=True, exist_ok=True)
    if options.replay is not None:
        from fuzz.targets import TARGETS

        TARGETS[options.target](options.replay.read_bytes())
    elif options.plain or importlib.util.find_spec("atheris") is None:
        _without(options)
    else:
        _with_atheris(options)


if __name__ == "__main__":
    main()
