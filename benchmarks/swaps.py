"""Swaps, switches and runs a text: by hardware slots, eviction policy, pack size and order.

    python benchmarks/swaps.py
    python benchmarks/swaps.py --bundle BUNDLE --slots 1 2 3 --plot swaps.png

JSON lines on stdout, a table on stderr. Every order is run on the emulated NPU and its contexts
are recorded; some combinations of slots and policy are run too ("how": "emulated"), the others
are the recording replayed through the same policy ("replayed"). Where both exist they must agree.
Milliseconds are those of a model of an NPU2: modelled, not measured; see cost_model.py.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

# Before numpy is imported: counts do not depend on threads, and on matrices this small they only
# wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import corpus
import reference_runtime
import report
import swap_tables
from recorder import Order
from swap_points import MODELLED, MOST_SLOTS, Point, measure, summary
from variants import one_context_a_gemm

from npu_embed import NpuEmbedError, settings
from npu_embed.bundle import Bundle
from npu_embed.embedder import default_bundle

TEXTS = 64
WORDS = "the cat sat on a mat and looked at every bird that flew over our old house".split()
WORDS_LOWEST, WORDS_RANGE = 4, 48


def sentences(count: int) -> list[str]:
    """Texts of 4 to 51 words, every length in turn: counts depend on nothing else of a text."""
    return [
        " ".join(WORDS[(i + j) % len(WORDS)] for j in range(WORDS_LOWEST + i * 29 % WORDS_RANGE))
        for i in range(count)
    ]


def pack_sizes(bundle: Path) -> list[int]:
    """From the smallest pack the bundle allows to its largest, each twice the one before."""
    opened = Bundle.open(bundle)
    lowest, highest = opened.max_tokens, opened.max_rows
    opened.close()
    sizes = [highest]
    while sizes[0] // 2 >= lowest:
        sizes.insert(0, sizes[0] // 2)
    return sizes


def run(
    bundle: Path, texts: Sequence[str], slots: Sequence[int], pack_rows: Sequence[int] | None
) -> list[Point]:
    """Measure the bundle as it is and with a context a GEMM; print a line a point."""
    points: list[Point] = []
    with tempfile.TemporaryDirectory(prefix="npu-embed-swaps-") as folder:
        split = one_context_a_gemm(bundle, Path(folder) / "split")
        for path in (bundle, split):
            sizes = sorted(pack_rows or pack_sizes(path))
            for order in [Order(None), *map(Order, sizes)]:
                outermost = order.pack_rows in (None, sizes[-1])
                for point in measure(path, texts, order, slots, really=outermost):
                    report.line(point.as_dict())
                    points.append(point)
    return points


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark from a command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bundle", type=Path, help="a bundle folder; default: the default bundle")
    parser.add_argument("--texts", type=corpus.positive, default=TEXTS, metavar="N")
    parser.add_argument("--corpus", metavar="FILE", help="a text a line, instead of made-up ones")
    parser.add_argument(
        "--slots",
        type=corpus.positive,
        nargs="+",
        default=list(range(1, MOST_SLOTS + 1)),
        metavar="N",
        help=f"hardware contexts of the NPU; default: 1 to {MOST_SLOTS}",
    )
    parser.add_argument(
        "--pack-rows",
        type=corpus.positive,
        nargs="+",
        metavar="N",
        help="tokens that share a forward at most; default: all powers of two the bundle allows",
    )
    parser.add_argument("--json", action="store_true", help="JSON lines only, no table")
    parser.add_argument("--markdown", action="store_true", help="the tables as Markdown")
    parser.add_argument("--plot", metavar="OUT.png", help="draw it (needs matplotlib)")
    args = parser.parse_args(argv)
    figures = reference_runtime.figures()
    for figure in figures:
        report.line({**figure.as_dict(), "ms": MODELLED})
    try:
        texts = corpus.read(args.corpus) if args.corpus else sentences(args.texts)
        points = run(
            args.bundle or settings.bundle() or default_bundle(),
            texts[: args.texts],
            sorted(set(args.slots)),
            args.pack_rows,
        )
    except (NpuEmbedError, OSError, ValueError) as error:
        raise SystemExit(str(error)) from error
    report.line(summary(points))
    if not args.json:
        swap_tables.show(points, figures, markdown=args.markdown)
    if args.plot:
        import plots  # matplotlib is an extra

        plots.swaps(points, args.plot)


if __name__ == "__main__":
    main()
