"""Real prose to measure with: documentation of the packages installed beside this Python.

Docstrings, descriptions and licences are read as text (nothing is imported), cut into fragments of
one to a few paragraphs, and chosen by hash: the same packages give the same corpus on every
machine. Another machine has other packages, so compare machines with a file written by one of them.

    python benchmarks/corpus.py --texts 2000 --out corpus.txt
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

DEFAULT_TEXTS = 2000
MIN_CHARS = 20
MAX_CHARS = 1500
# Paragraphs are joined until they are longer than one of these, in turn, and what stays shorter is
# left out: else one-line docstrings would drown the longer passages that people search.
CLOSE_CHARS = (80, 160, 40, 300, 120, 200, 0, 140, 240, 60, 500)
MIN_LETTERS = 0.72  # share of letters and spaces in prose; tables, code and URLs have less
OWN_PACKAGES = frozenset({"npu-embed"})

_BLANK_LINE = re.compile(r"\n[ \t]*\n")
_SPACE = re.compile(r"\s+")
_WORD = re.compile(r"[^\W\d_]{2,}")
_NOT_PROSE = re.compile(r">>>|^\s*(?:[-=*~#+|]{3,}|\.\. |:\w+:|@|\$ |```|<)", re.MULTILINE)
_LICENCE = re.compile(r"(?i)(?:licen[cs]e|copying|notice|authors)[^/]*$")


@dataclass(frozen=True, slots=True)
class Description:
    """What a corpus is: how many texts and tokens, the spread of lengths in tokens, its hash."""

    texts: int
    tokens: int
    min: int
    median: float
    mean: float
    p90: int
    max: int
    sha256: str


def _is_prose(paragraph: str) -> bool:
    if _NOT_PROSE.search(paragraph) or len(_WORD.findall(paragraph)) < 3:
        return False
    plain = sum(c.isalpha() or c.isspace() for c in paragraph)
    return plain >= MIN_LETTERS * len(paragraph)


def fragments(document: str) -> Iterator[str]:
    """The prose of a document, in pieces of one to a few paragraphs of one line each."""
    held: list[str] = []
    closed = 0
    for paragraph in _BLANK_LINE.split(document):
        if not _is_prose(paragraph):
            continue
        held.append(_SPACE.sub(" ", paragraph).strip())
        text = " ".join(held)
        if len(text) > CLOSE_CHARS[(len(document) + closed) % len(CLOSE_CHARS)]:
            closed += 1
            held = []
            if MIN_CHARS <= len(text) <= MAX_CHARS:
                yield text


def docstrings(source: str) -> Iterator[str]:
    """Every docstring of a module's source, the module's own first; none if it does not parse."""
    try:
        with warnings.catch_warnings():  # of invalid escapes in somebody else's strings
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    blocks: list[ast.AST] = [tree]
    for node in blocks:  # it grows: statements only, which is many times faster than ast.walk
        if isinstance(node, documented):
            text = ast.get_docstring(node)
            if text:
                yield text
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            blocks += getattr(node, name, ())


def documents() -> Iterator[str]:
    """The documents of the installed packages, ordered by package and path."""
    packages: dict[str, metadata.Distribution] = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name and name.lower() not in OWN_PACKAGES:
            packages.setdefault(name.lower(), distribution)
    for name in sorted(packages):
        distribution = packages[name]
        yield _description(distribution)
        for file in sorted(distribution.files or (), key=str):
            is_source = file.suffix == ".py"
            if not is_source and not _LICENCE.search(str(file)):
                continue
            try:
                text = Path(str(file.locate())).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            if is_source:
                yield from docstrings(text)
            else:
                yield text


def _description(distribution: metadata.Distribution) -> str:
    """The long description of a package: the part of its METADATA after the headers."""
    text = distribution.read_text("METADATA") or ""
    return text.partition("\n\n")[2]


def select(found: Iterator[str], texts: int) -> list[str]:
    """The `texts` distinct fragments with the lowest hashes, in the order of the hashes.

    A larger selection begins with a smaller one. Fewer come back where there are fewer.
    """

    def rank(text: str) -> bytes:
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()

    return sorted(set(found), key=rank)[:texts]


def make(texts: int = DEFAULT_TEXTS) -> list[str]:
    """The corpus of this Python's packages; fewer texts than asked for where they have fewer."""
    return select((f for document in documents() for f in fragments(document)), texts)


def kept(texts: int, folder: Path) -> list[str]:
    """`make(texts)`, from a file in `folder` where these very packages made it before."""
    names = sorted(f"{d.metadata['Name']} {d.version}" for d in metadata.distributions())
    key = hashlib.sha256(repr((names, sys.version, texts, CLOSE_CHARS)).encode()).hexdigest()[:12]
    path = folder / f"corpus-{key}.jsonl"
    if path.is_file():
        return read(path)
    made = make(texts)
    if made:
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.jsonl")
        write(made, part)
        part.rename(path)
    return made


def read(path: str | Path) -> list[str]:
    """The texts of a file: a JSON string or {"text": ...} a line in .jsonl, else a text a line.

    Raises:
        ValueError: a line that is neither, or no text at all.
    """
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    if Path(path).suffix == ".jsonl":
        texts = [_json_text(line, f"{path}:{i}") for i, line in enumerate(lines, 1) if line.strip()]
    else:
        texts = [line for line in lines if line.strip()]
    if not texts:
        raise ValueError(f"{path}: no text, wanted one a line.")
    return texts


def _json_text(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: no JSON ({error}), wanted a string a line.") from error
    if isinstance(value, dict):
        value = value.get("text")
    if not isinstance(value, str):
        raise ValueError(f'{where}: {line[:60]}, wanted a JSON string or {{"text": "..."}}.')
    return value


def write(texts: Sequence[str], path: str | Path) -> None:
    """Write a file that `read` gives back: JSON strings if it ends in .jsonl, else plain lines.

    Raises:
        ValueError: a text that a plain line cannot hold.
    """
    as_json = Path(path).suffix == ".jsonl"
    if not as_json and any("\n" in t or "\r" in t or not t.strip() for t in texts):
        raise ValueError(f"{path}: a text is blank or has several lines; write a .jsonl file.")
    lines = (json.dumps(t, ensure_ascii=False) if as_json else t for t in texts)
    Path(path).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")


def describe(texts: Sequence[str], lengths: Sequence[int]) -> Description:
    """The description of texts whose lengths in tokens are given."""
    ordered = sorted(lengths)
    digest = hashlib.sha256("\0".join(texts).encode("utf-8", "surrogatepass"))
    return Description(
        texts=len(texts),
        tokens=sum(ordered),
        min=ordered[0],
        median=statistics.median(ordered),
        mean=round(statistics.fmean(ordered), 1),
        p90=ordered[min(len(ordered) - 1, len(ordered) * 9 // 10)],
        max=ordered[-1],
        sha256=digest.hexdigest()[:16],
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--corpus FILE and --texts N, as every benchmark takes them."""
    parser.add_argument("--corpus", metavar="FILE", help="a text a line, or .jsonl; default: made")
    parser.add_argument(
        "--texts",
        type=positive,
        metavar="N",
        help=f"how many texts: of the file all, of the made corpus {DEFAULT_TEXTS} by default",
    )


def positive(text: str) -> int:
    """An argument that is an integer >= 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: wanted an integer >= 1")
    return value


def chosen(args: argparse.Namespace) -> list[str]:
    """The texts that add_arguments' options ask for.

    Raises:
        SystemExit: the file cannot be used, or this Python's packages have no documentation.
    """
    try:
        texts = (
            read(args.corpus)[: args.texts] if args.corpus else make(args.texts or DEFAULT_TEXTS)
        )
    except (OSError, ValueError) as error:
        raise SystemExit(f"--corpus: {error}") from error
    if not texts:
        raise SystemExit("no documentation beside this Python; pass --corpus FILE, a text a line.")
    if args.texts is None:
        return texts
    if len(texts) < args.texts:
        sys.stderr.write(f"{len(texts)} texts, fewer than the {args.texts} asked for\n")
    return texts[: args.texts]


def _lengths(texts: Sequence[str], bundle: str | None) -> list[int]:
    from npu_embed.bundle import Bundle
    from npu_embed.embedder import default_bundle

    tokenizer = Bundle.open(bundle or default_bundle()).open_tokenizer()
    return [len(e.ids) for e in tokenizer.encode_batch(texts)]


def main(argv: Sequence[str] | None = None, out: Callable[[str], None] = print) -> None:
    """Make a corpus, describe it on stdout, write it where --out says."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_arguments(parser)
    parser.add_argument("--out", metavar="FILE", help="write the texts: .txt or .jsonl")
    parser.add_argument("--bundle", help="whose tokenizer counts; default: the default bundle")
    args = parser.parse_args(argv)
    texts = chosen(args)
    out(json.dumps(asdict(describe(texts, _lengths(texts, args.bundle)))))
    if args.out:
        write(texts, args.out)


if __name__ == "__main__":
    main()
