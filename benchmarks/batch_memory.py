"""The peak memory of `npu-embed batch` by rows, beside that of the model alone.

Prints a JSON line a count of rows: jsonl of short rows -> parquet, each run in a process of its
own. model_mib is the peak of a process that embeds 1,024 of the rows and does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORDS = ("cats", "a red car", "plants on a sofa", "the password of a sofa, and of a car")

MODEL = """
import json, sys, npu_embed
texts = [json.loads(line)["text"] for line in open(sys.argv[1])][:1024]
with npu_embed.Embedder(sys.argv[2], "emulated") as e:
    e.embed(texts)
"""
JOB = """
import sys
from npu_embed.cli import main
source, bundle, output = sys.argv[1:]
main(["batch", source, "-o", output, "--bundle", bundle, "--device", "emulated"],
     standalone_mode=False)
"""
PEAK = "\nimport resource\nprint(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"


def write_rows(path: Path, count: int) -> Path:
    """A jsonl file of short rows, each with an id and a column that is often null."""
    rows = ({"id": i, "text": f"{i} {WORDS[i % 4]}", "tag": i % 3 or None} for i in range(count))
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def peak_mib(program: str, *args: object) -> float:
    """The peak memory in MiB of a process that runs a program."""
    done = subprocess.run(
        [sys.executable, "-c", program + PEAK, *map(str, args)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return round(int(done.stdout.split()[-1]) / 1024, 1)


def main() -> None:
    """Measure, and print the lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundle", required=True, type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for count in options.rows:
            source = write_rows(Path(folder) / f"{count}.jsonl", count)
            bundle = options.bundle.resolve()
            model = peak_mib(MODEL, source, bundle)
            job = peak_mib(JOB, source, bundle, Path(folder) / f"{count}.parquet")
            line = {"bundle": bundle.name, "rows": count, "model_mib": model, "job_mib": job}
            print(json.dumps({**line, "more_mib": round(job - model, 1)}), flush=True)


if __name__ == "__main__":
    main()
