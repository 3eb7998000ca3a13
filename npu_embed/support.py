"""What this version reads, runs and exports, as docs/support.md: `python -m npu_embed.support`.

The page is made from the tables that the code itself goes by, and a test keeps the two equal.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Sequence

from .bundle import TARGETS
from .emulator.array import PROGRAMS
from .emulator.txn_layout import LAYOUTS, Layout
from .exporters.exporter import FAMILIES as EXPORTED
from .exporters.exporter import PUBLISHED as EXPORTED_PUBLISHED
from .exporters.geometry import Epilogue
from .exporters.parts import ATTENTIONS
from .exporters.parts import LAYOUTS as BUNDLE_LAYOUTS
from .hostops import POOLINGS
from .models import FAMILIES
from .models.embedding_gemma2 import EmbeddingGemma2
from .published import FAMILY as PUBLISHED
from .streamlint import NOT_EXECUTED
from .tensors import ITEM_BYTES, TXT_DTYPES, VIEWED

_HEAD = """\
# What is supported

Made by `python -m npu_embed.support > docs/support.md` from the tables in the code; a test keeps
them equal.
"""

_EPILOGUES = {
    Epilogue.NONE: "x",
    Epilogue.GELU_ERF: "x/2 (1 + erf(x/sqrt 2))",
    Epilogue.GELU_TANH: "x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))",
    Epilogue.GEGLU_PAIR: "GELU (tanh) of a tile's first half, times its second half",
    Epilogue.TANH: "tanh x",
}
_HOST_ATTENTION = ("gemma3_text", "embedding_gemma2")


def page() -> str:
    """The whole page, in Markdown."""
    sections = (
        _HEAD,
        _section("Model families", _families()),
        _section("Bundle layouts", _layouts()),
        _section("NPU generations", _targets()),
        _section("GEMM epilogues", _epilogues()),
        _section("Array programs", _programs()),
        _section("Tensors", _tensors()),
        _section("Instruction streams", _operations(), _STREAMS),
    )
    return "\n".join(sections)


_STREAMS = """\
TXN versions {versions}, with or without the outer wrapper of two words; `inspect` also reads the
hexadecimal text form and the form older than TXN. *Executed* is by the emulated array; hardware
executes what its firmware knows.
"""


def _section(title: str, table: str, before: str = "") -> str:
    versions = " and ".join(f"{major}.{minor}" for major, minor in LAYOUTS)
    said = before.format(versions=versions)
    return f"## {title}\n\n{said}{chr(10) if said else ''}{table}"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def _mark(yes: bool) -> str:
    return "yes" if yes else "no"


def _families() -> str:
    rows = []
    for name, family in FAMILIES.items():
        exported = name in EXPORTED or name == PUBLISHED
        attention = " or ".join(ATTENTIONS) if name in _HOST_ATTENTION else ATTENTIONS[0]
        if name == PUBLISHED:
            attention = "host, of images npu"
        images = issubclass(family, EmbeddingGemma2)
        rows.append((f"`{name}`", _mark(exported), attention, _mark(images)))
    head = ("family", "exported", "attention on", "images")
    pooled = f"\nPoolings: {', '.join(f'`{name}`' for name in POOLINGS)}.\n"
    return _table(head, rows) + pooled


def _layouts() -> str:
    own, published = BUNDLE_LAYOUTS
    rows = (
        (f"`{own}`", "`tensors.safetensors`", ", ".join(f"`{f}`" for f in EXPORTED)),
        (
            f"`{published}`",
            "`tensors.txt` and `tensors.bin`",
            ", ".join(f"`{f}`" for f in EXPORTED_PUBLISHED),
        ),
    )
    return _table(("layout", "tensors in", "exported for"), rows)


def _targets() -> str:
    return _table(
        ("target", "generation in a stream's header"),
        ((f"`{name}`", generation) for name, generation in TARGETS.items()),
    )


def _epilogues() -> str:
    return _table(
        ("run-time word", "in a manifest", "of the sum x"),
        ((int(e), f"`{e.name.lower()}`", _EPILOGUES[e]) for e in Epilogue),
    )


def _programs() -> str:
    rows = []
    for name, program in PROGRAMS.items():
        assert isinstance(program, type)
        constants = ", ".join(f"`{field.name}`" for field in dataclasses.fields(program))
        rows.append((f"`{name}`", constants))
    return _table(("program", "constants"), rows)


def _tensors() -> str:
    rows = (
        (f"`{dtype}`", size, _mark(dtype in VIEWED), _mark(dtype in TXT_DTYPES))
        for dtype, size in ITEM_BYTES.items()
    )
    return _table(("dtype", "bytes", "read as numbers", "in tensors.txt"), rows)


def _operations() -> str:
    rows = []
    for opcode in sorted({opcode for layouts in LAYOUTS.values() for opcode in layouts}):
        first = next(layouts[opcode] for layouts in LAYOUTS.values() if opcode in layouts)
        executed = not isinstance(_any(opcode, first), NOT_EXECUTED)
        versions = [f"{major}.{minor}" for (major, minor), of in LAYOUTS.items() if opcode in of]
        rows.append((f"{opcode:#04x}", f"`{first.name}`", ", ".join(versions), _mark(executed)))
    return _table(("opcode", "name", "in version", "executed"), rows)


def _any(opcode: int, layout: Layout) -> object:
    """Some operation of an opcode."""
    words = layout.sizes[0] // 4 if layout.sizes else layout.head_words
    return layout.build((opcode, *[0] * (words - 1)), 0)


if __name__ == "__main__":
    sys.stdout.write(page())
