"""Throughput and peak memory against pack size, text length, corpus size and threads.

    python benchmarks/scale.py
    python benchmarks/scale.py --full --plot scale.png
    python benchmarks/scale.py --axes pack --pack-rows 512 2048

Each point is a process of its own on the emulated NPU; they take turns in every round. JSON lines
on stdout, tables on stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import corpus
import report
import scale_points
from scale_points import AXES, DEFAULT, ONE_CALL, Point
from scale_texts import Words, mixed
from stretched import MOST_ROWS, stretched

from npu_embed import NpuEmbedError, settings
from npu_embed.bundle import Bundle
from npu_embed.embedder import default_bundle

CALL_TEXTS = 1000


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large it all is. tokens: of each point, except on the corpus axis."""

    rounds: int
    tokens: int
    pack_rows: tuple[int, ...]
    lengths: tuple[int, ...]
    corpus_texts: tuple[int, ...]


QUICK = Sizes(3, 8192, (256, 1024, 4096), (8, 64, 512), (100, 1200))
FULL = Sizes(
    3,
    65536,
    (256, 512, 1024, 2048, 4096),
    (8, 16, 32, 64, 128, 256, 384, 512),
    (100, 1000, 10_000, 100_000),
)


def fitting(path: Path, rows: Sequence[int], lengths: Sequence[int], folder: Path) -> Path:
    """A bundle for packs and texts of these sizes: itself if it is large enough, else a copy.

    Where it cannot be stretched so far it stays as it is, or is stretched as far as it can be.
    """
    most_rows, most_tokens = limits(path)
    max_rows = min(max([most_rows, *rows]), MOST_ROWS)
    max_tokens = max([most_tokens, *lengths])
    if (max_rows, max_tokens) == (most_rows, most_tokens):
        return path
    try:
        return stretched(path, folder, max_rows=max_rows, max_tokens=max_tokens)
    except ValueError as error:
        sys.stderr.write(f"not stretched: {error}\n")
        return path


def within(what: str, sizes: Sequence[int], least: int, most: int) -> list[int]:
    """The sizes from least to most; the others are named on stderr."""
    left_out = [n for n in sizes if not least <= n <= most]
    if left_out:
        told = ", ".join(map(str, left_out))
        sys.stderr.write(f"left out: {what} of {told} tokens; this bundle: {least} to {most}\n")
    return [n for n in sizes if n not in left_out]


def limits(path: Path) -> tuple[int, int]:
    """The most rows of a pack, and the most tokens of a text."""
    bundle = Bundle.open(path)
    try:
        return bundle.max_rows, bundle.max_tokens
    finally:
        bundle.close()


class Planner:
    """Makes the points of each axis, and their texts in a folder."""

    def __init__(
        self, bundle: Path, texts: Sequence[str], sizes: Sizes, call_texts: int, folder: Path
    ) -> None:
        self._bundle, self._texts, self._sizes, self._folder = bundle, texts, sizes, folder
        self._call_texts = call_texts
        opened = Bundle.open(bundle)
        try:
            tokenizer = opened.open_tokenizer()
        finally:
            opened.close()
        self._words = Words(texts, tokenizer)
        self._lengths = [len(e.ids) for e in tokenizer.encode_batch(list(texts))]
        self._specials = tokenizer.special_tokens

    def points(self, axis: str, threads: Sequence[int]) -> list[Point]:
        """The points of an axis."""
        if axis == "pack":
            return self._pack()
        if axis == "length":
            return self._length()
        if axis == "corpus":
            return self._corpus()
        return scale_points.thread_points(threads, self._bundle, self._mixed())

    def _pack(self) -> list[Point]:
        """The same mixed texts in packs of several sizes.

        One bundle for all, whose texts are as long as before: a pack holds at least the longest.
        """
        bundle = fitting(self._bundle, self._sizes.pack_rows, (), self._folder / "rows")
        most_rows, most_tokens = limits(bundle)
        rows = within("packs", self._sizes.pack_rows, most_tokens, most_rows)
        texts = self._mixed()
        return [Point("pack", DEFAULT, n, bundle, texts, pack_rows=n) for n in rows]

    def _length(self) -> list[Point]:
        """As many tokens in texts of several lengths, one bundle for all."""
        bundle = fitting(self._bundle, (), self._sizes.lengths, self._folder / "tokens")
        lengths = within("texts", self._sizes.lengths, self._specials + 1, limits(bundle)[1])
        points = []
        for n in lengths:
            texts = self._words.of_length(n, max(1, self._sizes.tokens // n))
            points.append(Point("length", DEFAULT, n, bundle, self._write(f"length-{n}", texts)))
        return points

    def _corpus(self) -> list[Point]:
        """More and more short texts, in one call and in calls of call_texts."""
        points = []
        for n in self._sizes.corpus_texts:
            file = self._write(f"corpus-{n}", self._words.short(n))
            points.append(Point("corpus", ONE_CALL, n, self._bundle, file))
            if n > self._call_texts:
                series, size = f"calls of {self._call_texts}", self._call_texts
                points.append(Point("corpus", series, n, self._bundle, file, call_texts=size))
        return points

    def _mixed(self) -> Path:
        return self._write("mixed", mixed(self._texts, self._lengths, self._sizes.tokens))

    def _write(self, name: str, texts: Iterable[str]) -> Path:
        path = self._folder / f"{name}.jsonl"
        with path.open("w", encoding="utf-8") as lines:
            for text in texts:
                lines.write(json.dumps(text) + "\n")
        return path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bundle", type=Path, help="a bundle folder; default: the default bundle")
    parser.add_argument("--corpus", metavar="FILE", help="a text a line, or .jsonl; default: made")
    parser.add_argument("--texts", type=corpus.positive, metavar="N", help="of the corpus at most")
    parser.add_argument("--full", action="store_true", help="sizes for a plot; takes long")
    parser.add_argument("--axes", nargs="+", choices=AXES, default=AXES, help="default: all")
    for option, what in (
        ("--pack-rows", "pack sizes"),
        ("--lengths", "tokens of a text"),
        ("--corpus-texts", "corpus sizes"),
        ("--threads", "cores, and BLAS threads"),
    ):
        parser.add_argument(option, type=corpus.positive, nargs="+", metavar="N", help=what)
    parser.add_argument("--tokens", type=corpus.positive, metavar="N", help="of a point")
    parser.add_argument("--rounds", type=corpus.positive, metavar="N")
    parser.add_argument(
        "--call-texts",
        type=corpus.positive,
        default=CALL_TEXTS,
        metavar="N",
        help="the corpus axis is measured in one call, and in calls of this many texts",
    )
    parser.add_argument("--json", action="store_true", help="JSON lines only, no tables")
    parser.add_argument("--plot", metavar="OUT.png", help="draw it (needs matplotlib)")
    return parser


def sizes_of(args: argparse.Namespace) -> Sizes:
    """The sizes the options ask for."""
    base = FULL if args.full else QUICK
    return Sizes(
        args.rounds or base.rounds,
        args.tokens or base.tokens,
        tuple(args.pack_rows or base.pack_rows),
        tuple(args.lengths or base.lengths),
        tuple(args.corpus_texts or base.corpus_texts),
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark from a command line."""
    args = _parser().parse_args(argv)
    sizes, texts = sizes_of(args), corpus.chosen(args)
    try:
        bundle = args.bundle or settings.bundle() or default_bundle()
        with tempfile.TemporaryDirectory(prefix="npu-embed-scale-") as folder:
            plan = Planner(bundle, texts, sizes, args.call_texts, Path(folder))
            points = [p for axis in args.axes for p in plan.points(axis, args.threads or (1, 2))]
            results = scale_points.measure(points, sizes.rounds)
    except (NpuEmbedError, ValueError) as error:
        raise SystemExit(str(error)) from error
    for record in scale_points.summaries(results):
        report.line(record)
    report.line({"benchmark": "scale", "bundle": bundle.name, "machine": report.machine()})
    if not args.json:
        scale_points.show(results)
    if args.plot:
        import scale_plots  # matplotlib is an extra

        scale_plots.panels(results, bundle.name, args.plot)


if __name__ == "__main__":
    main()
