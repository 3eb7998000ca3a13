"""Texts and tokens a second of an Embedder on a corpus, and where the time goes.

    python benchmarks/throughput.py
    python benchmarks/throughput.py --corpus texts.txt --pack-rows 512 2048 --repeat 5

JSON lines on stdout: one a repeat, then a summary with medians and ranges; a table on stderr. With
several --pack-rows the settings take turns in every round, so that a busy machine hits all alike.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import corpus
import host_floor
import report
from host_floor import busy_seconds, since, split
from host_traffic import traffic
from report import Spread

from npu_embed import Embedder, NpuEmbedError, Stats, __version__
from npu_embed.bundle import Bundle

WARM_UP_TEXTS = 64


@dataclass(frozen=True, slots=True)
class Round:
    """One pass over the corpus: wall seconds, in all and by stage, and what was counted.

    The stages add up to seconds; host_floor.split says which is whose.
    """

    seconds: float
    stages: dict[str, float]
    counts: dict[str, int]


def _counts(now: Stats, before: Stats) -> dict[str, int]:
    counted = {
        name: getattr(now, name) - getattr(before, name)
        for name in ("texts", "tokens", "truncated", "packs")
    }
    return {**counted, **asdict(now.counters.since(before.counters))}


def measure(embedder: Embedder, texts: Sequence[str]) -> Round:
    """Embed the texts once, timed."""
    before, busy_before = embedder.stats, busy_seconds(embedder)
    gc.collect()  # of the rounds before, not in the timed part
    start = time.perf_counter()
    embedder.embed(texts)
    seconds = time.perf_counter() - start
    after, busy_after = embedder.stats, busy_seconds(embedder)
    busy = None if busy_after is None else since(busy_after, busy_before or {})
    stages = since(after.seconds, before.seconds)
    stages.pop("open", None)
    return Round(seconds, split(seconds, stages, busy), _counts(after, before))


def summary(rounds: Sequence[Round], bundle: Bundle, rate: host_floor.CopyRate) -> dict[str, Any]:
    """Medians and ranges over the rounds, each stage's share, and the host's time and its floor."""
    counts = rounds[-1].counts
    least = traffic(bundle, counts["tokens"], counts["texts"])
    stages = {}
    for stage in rounds[0].stages:
        spread = Spread.of(r.stages[stage] for r in rounds)
        share = Spread.of(r.stages[stage] / r.seconds for r in rounds)
        stages[stage] = {**asdict(spread), "share": share.median}
    return {
        "texts": counts["texts"],
        "tokens": counts["tokens"],
        "repeats": len(rounds),
        "seconds": Spread.of(r.seconds for r in rounds),
        "texts_per_s": Spread.of((r.counts["texts"] / r.seconds for r in rounds), 2),
        "tokens_per_s": Spread.of((r.counts["tokens"] / r.seconds for r in rounds), 1),
        "stages": stages,
        "host": host_floor.summary([r.stages for r in rounds], counts["tokens"], least, rate),
        "counts": counts,
    }


def run(
    texts: Sequence[str],
    *,
    bundle: str | None,
    device: str | None,
    repeat: int,
    pack_rows: Sequence[int | None],
) -> list[dict[str, Any]]:
    """Measure every pack size in turn, `repeat` times; print a line a round, give the summaries."""
    embedders: list[Embedder] = []
    try:
        for rows in pack_rows:
            embedders.append(Embedder(bundle, device, pack_rows=rows))
            # Contexts, kernels and the page cache, so that no round pays for what happens once.
            embedders[-1].embed(texts[:WARM_UP_TEXTS])
        rounds: list[list[Round]] = [[] for _ in embedders]
        for number in range(1, repeat + 1):
            for embedder, rows, done in zip(embedders, pack_rows, rounds, strict=True):
                done.append(measure(embedder, texts))
                told = {"benchmark": "throughput", "round": number, "pack_rows": rows}
                report.line({**told, **asdict(done[-1])})
        # Of the same minutes as the rounds, on the same machine.
        rate = host_floor.CopyRate.measure()
        lengths = [len(ids) for ids in embedders[0].tokenize(texts)]
        about = asdict(corpus.describe(texts, lengths))
        return [
            {
                "benchmark": "throughput",
                "summary": True,
                "npu_embed": __version__,
                "bundle": embedder.bundle.name,
                "device": embedder.device,
                "pack_rows": rows or embedder.bundle.max_rows,
                **summary(done, embedder.bundle, rate),
                "corpus": about,
                "machine": report.machine(),
            }
            for embedder, rows, done in zip(embedders, pack_rows, rounds, strict=True)
        ]
    finally:
        for embedder in embedders:
            embedder.close()


def show(found: Mapping[str, Any]) -> None:
    """A summary as a table."""
    sys.stderr.write(
        f"\n{found['bundle']} on the {found['device']} device, packs of {found['pack_rows']} rows: "
        f"{found['texts']} texts, {found['tokens']} tokens\n"
        f"  {found['seconds']} s, {found['texts_per_s']} texts/s, {found['tokens_per_s']} tokens/s "
        f"(median and range of {found['repeats']})\n"
    )
    rows = [
        (
            stage,
            f"{part['median']:.3f}",
            f"{part['share']:.1%}",
            f"{1e6 * part['median'] / found['tokens']:.2f}",
        )
        for stage, part in found["stages"].items()
    ]
    report.table(("stage", "s", "share", "us/token"), rows)
    host = found["host"]
    sys.stderr.write(
        f"  host: {host['us_per_token']} us/token, {host['share'].median:.1%} of the time\n"
    )
    if host["floor"] is not None:
        size = sum(host["floor"]["bytes_per_token"].values())
        sys.stderr.write(
            f"  its floor: {size:,.0f} bytes/token at {host['copy_gb_per_s']} GB/s = "
            f"{host['floor']['us_per_token']:.2f} us/token; host/floor {host['times_floor']}\n"
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark from a command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bundle", help="a bundle folder; default: the default bundle")
    corpus.add_arguments(parser)
    parser.add_argument("--device", choices=("auto", "npu", "emulated"))
    parser.add_argument("--repeat", type=corpus.positive, default=3, metavar="N")
    parser.add_argument(
        "--pack-rows",
        type=corpus.positive,
        nargs="+",
        default=[None],
        metavar="N",
        help="tokens that share a forward at most; several are compared",
    )
    parser.add_argument("--json", action="store_true", help="JSON lines only, no table")
    parser.add_argument("--plot", metavar="OUT.png", help="draw the stages (needs matplotlib)")
    args = parser.parse_args(argv)
    texts = corpus.chosen(args)
    try:
        summaries = run(
            texts,
            bundle=args.bundle,
            device=args.device,
            repeat=args.repeat,
            pack_rows=args.pack_rows,
        )
    except NpuEmbedError as error:
        raise SystemExit(str(error)) from error
    for found in summaries:
        report.line(found)
        if not args.json:
            show(found)
    if args.plot:
        import plots  # matplotlib is an extra

        plots.stages(summaries, args.plot)


if __name__ == "__main__":
    main()
