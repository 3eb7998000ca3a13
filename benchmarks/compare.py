"""npu-embed on the emulated NPU beside the CPU engines, each in a process of its own.

    python benchmarks/compare.py                                   # all but gemma, 15 minutes
    python benchmarks/compare.py --workload few one --rounds 5
    python benchmarks/compare.py --workload gemma --plot gemma.png

mixed   2,000 texts of all lengths in one call, and the most memory it takes
few     300 of them, unsorted
one     one short text a call, warm
cold    from the start of the process to the first vector
gemma   64 texts in a full-size EmbeddingGemma 2 of random weights

Timed: texts to vectors, tokenization included. Not timed (but in cold): starting, loading, a warm-
up. An engine with a batch or pack size is tried with several and measured with the fastest. JSON
lines on stdout, tables on stderr. The peers are installed into benchmarks/.venv on first use.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import contenders
import corpus
import peers
import report
from peers import Unavailable
from processes import EngineFailed
from targets import HF, ST, Verdict
from workloads import Comparison, Kind, Workload

from npu_embed import NpuEmbedError

FEW_TEXTS = 300
# The shortest twentieth: queries, commands, titles.
ONE_SHARE, ONE_LEAST, ONE_MOST = 20, 10, 100
COLD_LEAST_ROUNDS = 5  # a start is short, and its spread wide
COLD_TEXT = "two cats sleeping on a sofa"
# Documents, by the tokens of the checkpoint's own tokenizer.
GEMMA_TEXTS, GEMMA_TOKENS = 64, range(59, 222)
KINDS: Mapping[str, Kind] = {"one": "each", "cold": "cold"}  # the others: all in one call


def texts_of(file: str | None, texts: int | None) -> list[str]:
    """The texts that every workload chooses from.

    Raises:
        SystemExit: the file cannot be used, or this Python's packages have no documentation.
    """
    try:
        if file:
            return corpus.read(file)
        made = corpus.kept(max(texts or 0, corpus.DEFAULT_TEXTS), peers.RESULTS)
    except (OSError, ValueError) as error:
        raise SystemExit(f"--corpus: {error}") from error
    if not made:
        raise SystemExit("no documentation beside this Python; pass --corpus FILE, a text a line.")
    return made


def shortest(texts: Sequence[str], lengths: Sequence[int]) -> list[int]:
    """The indices of the shortest twentieth of the texts, in their order."""
    count = min(len(texts), ONE_MOST, max(ONE_LEAST, len(texts) // ONE_SHARE))
    return sorted(sorted(range(len(texts)), key=lambda i: lengths[i])[:count])


def minilm_workload(name: str, found: contenders.Setup, texts: int | None, rounds: int) -> Workload:
    """The workload mixed, few, one or cold of the engines that run MiniLM."""
    numbers = list(range(len(found.texts)))[:texts]
    if name == "few":
        numbers = numbers[:FEW_TEXTS]
    elif name == "one":
        numbers = shortest(found.texts, found.lengths)
    chosen, lengths = [found.texts[i] for i in numbers], [found.lengths[i] for i in numbers]
    if name == "cold":
        chosen, lengths = [COLD_TEXT], [found.count(COLD_TEXT)]
        rounds = max(rounds, COLD_LEAST_ROUNDS)
    engines, missing = found.part(*contenders.ENGINES_OF[name])
    if name in ("one", "cold"):  # one text: there is nothing to batch
        engines = [contenders.as_it_comes(engine) for engine in engines]
    kind = KINDS.get(name, "run")
    return Workload(name, kind, chosen, lengths, engines, ST, rounds, missing)


def gemma_workload(found: contenders.Setup, texts: int | None, rounds: int) -> Workload:
    """The workload gemma: the first texts that are as long as documents are.

    Raises:
        SystemExit: there is none.
    """
    numbers = [i for i, length in enumerate(found.lengths) if length in GEMMA_TOKENS]
    numbers = numbers[: min(texts or GEMMA_TEXTS, GEMMA_TEXTS)]
    if not numbers:
        raise SystemExit(
            f"--corpus: no text of {GEMMA_TOKENS[0]} to {GEMMA_TOKENS[-1]} tokens, wanted up to "
            f"{GEMMA_TEXTS} for --workload gemma."
        )
    chosen, lengths = [found.texts[i] for i in numbers], [found.lengths[i] for i in numbers]
    engines, missing = found.part(*contenders.ENGINES_OF["gemma"])
    return Workload("gemma", "run", chosen, lengths, engines, HF, rounds, missing)


def show(found: Mapping[str, Any]) -> None:
    """A workload's summary as a table."""
    about, beside = found["corpus"], found["beside"]
    sys.stderr.write(
        f"\n{found['workload']}: {about.tokens:,} tokens, {about.min} to {about.max} a text, in "
        f"{about.texts:,}; median and range of {found['rounds']} rounds\n"
    )
    timed = "ms a text" if found["kind"] == "each" else "s"
    rows = []
    for name, e in found["engines"].items():
        alike = e["agreement"]
        rows.append(
            (
                name,
                str(e["setting"] or "-"),
                str(e["ms"] if found["kind"] == "each" else e["seconds"]),
                str(e.get("tokens_per_s", "-")),
                str(beside.get(name, "-")),
                f"{alike.cosine_min:.6f} {alike.cosine_mean:.6f}" if alike else "-",
                f"{e['peak_mib'].high:,.0f}" if "peak_mib" in e else "-",
            )
        )
    is_what = f"npu-embed is {found['npu_embed_is']}"
    header = ("engine", "batch", timed, "tokens/s", is_what, "cosine min, mean", "MiB")
    report.table(header, rows)
    for name, reason in found["skipped"].items():
        sys.stderr.write(f"{name}: skipped, {reason}\n")


def show_verdicts(verdicts: Sequence[Verdict]) -> None:
    """The targets of all workloads, what was found, and which were reached."""
    sys.stderr.write("\ntargets, for the default texts\n")
    report.table(("workload", "target", "found", ""), [v.row() for v in verdicts])


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workload",
        nargs="+",
        choices=list(contenders.ENGINES_OF),
        default=[name for name in contenders.ENGINES_OF if name != "gemma"],
        metavar="NAME",
        help="which of %(choices)s; default: all but gemma",
    )
    parser.add_argument("--corpus", metavar="FILE", help="a text a line, or .jsonl; default: made")
    parser.add_argument(
        "--texts", type=corpus.positive, metavar="N", help="at most N texts, for a quick look"
    )
    parser.add_argument("--rounds", type=corpus.positive, default=3, metavar="N")
    parser.add_argument(
        "--bundle", help="a bundle; needs --checkpoint. Default: the default bundle"
    )
    parser.add_argument("--checkpoint", help="the folder the bundle was exported from")
    parser.add_argument("--peer-python", help="a Python that has the peers; default: made")
    parser.add_argument("--json", action="store_true", help="JSON lines only, no tables")
    parser.add_argument("--plot", metavar="OUT.png", help="draw it all (needs matplotlib)")
    return parser


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure what was asked for; the summaries, which are printed as they come."""
    pool = texts_of(args.corpus, args.texts)
    python = contenders.python_of_peers(args.peer_python)
    summaries, verdicts = [], []
    setups: dict[str, contenders.Setup] = {}
    for name in args.workload:
        if name == "gemma":
            found = gemma_workload(contenders.gemma(pool, python), args.texts, args.rounds)
        else:
            if "minilm" not in setups:
                setups["minilm"] = contenders.minilm(pool, python, args.bundle, args.checkpoint)
            found = minilm_workload(name, setups["minilm"], args.texts, args.rounds)
        comparison = Comparison(found)
        summaries.append(comparison.measure())
        verdicts += comparison.judged()
        report.line(summaries[-1])
        if not args.json:
            show(summaries[-1])
    if not args.json:
        show_verdicts(verdicts)
    return summaries


def main(argv: Sequence[str] | None = None) -> None:
    """Run the comparison from a command line."""
    parser = arguments()
    args = parser.parse_args(argv)
    if bool(args.bundle) != bool(args.checkpoint):
        parser.error("--bundle and --checkpoint go together: all must run the same weights.")
    if args.plot:
        import plots  # matplotlib is an extra: missing, it is missed before the work
    try:
        summaries = run(args)
    except (NpuEmbedError, EngineFailed, Unavailable, OSError) as error:
        raise SystemExit(str(error)) from error
    if args.plot:
        plots.comparison(summaries, args.plot)


if __name__ == "__main__":
    main()
