"""docs/support.md says what the code does."""

from __future__ import annotations

from pathlib import Path

import pytest

from npu_embed import support
from npu_embed.emulator.controller import Execution, Fault, Stall
from npu_embed.emulator.epilogues import GEGLU_TANH, GELU_ERF, GELU_TANH, NONE, TANH
from npu_embed.emulator.txn_layout import LAYOUTS
from npu_embed.exporters.exporter import FAMILIES as EXPORTED
from npu_embed.exporters.exporter import PUBLISHED
from npu_embed.exporters.geometry import Epilogue
from npu_embed.models import FAMILIES
from npu_embed.streamlint import NOT_EXECUTED
from npu_embed.tensors import VIEWED, Tensors

PAGE = Path(__file__).parents[2] / "docs/support.md"


def test_the_page_is_what_the_code_makes_of_it() -> None:
    wanted = "`python -m npu_embed.support > docs/support.md` makes it anew"
    assert PAGE.read_text(encoding="utf-8") == support.page(), wanted


@pytest.mark.parametrize("opcode", sorted({op for layouts in LAYOUTS.values() for op in layouts}))
def test_an_operation_said_to_be_executed_is(opcode: int) -> None:
    layout = next(layouts[opcode] for layouts in LAYOUTS.values() if opcode in layouts)
    op = support._any(opcode, layout)
    said = ""
    try:
        Execution(4, {}).step(0, op)  # type: ignore[arg-type]
    except (Fault, Stall) as failure:
        said = str(failure)
    assert ("operations are not emulated" in said) == isinstance(op, NOT_EXECUTED)


def test_the_emulator_has_the_exporter_s_epilogues() -> None:
    assert list(Epilogue) == [NONE, GELU_ERF, GELU_TANH, GEGLU_TANH, TANH]
    assert set(support._EPILOGUES) == set(Epilogue)


def test_what_is_exported_can_be_run() -> None:
    assert set(EXPORTED) <= set(FAMILIES)
    assert set(PUBLISHED) <= set(EXPORTED)


def test_every_dtype_read_as_numbers_has_its_reader() -> None:
    assert all(hasattr(Tensors, dtype) for dtype in VIEWED)
