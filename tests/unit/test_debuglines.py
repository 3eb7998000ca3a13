"""The ladder of NPU_EMBED_DEBUG: which lines each level has, and that they can be parsed."""

from __future__ import annotations

import logging
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from rigs import Slots

from npu_embed import Embedder, events, seeing, settings
from npu_embed.debuglines import DebugLines, logger

PAIR = re.compile(r'[a-z_]+=([^\s"]+|"[^"]*")')
LADDER = [{"open", "context", "load"}, {"run"}, {"drop", "patch"}, {"op"}]


@pytest.fixture(autouse=True)
def _ends_with_the_test() -> Iterator[None]:
    yield
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("NPU_EMBED_DEBUG", raising=False)
        seeing.start_from_settings()


def lines(err: str) -> list[dict[str, str]]:
    """What was said, each line's pairs."""
    found = []
    for line in err.splitlines():
        words = PAIR.sub("", line)
        assert not words.strip(), line
        found.append(dict(word.split("=", 1) for word in shlex.split(line)))
    return found


def say(level: int, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Embed three texts of three lengths at a level."""
    monkeypatch.setenv("NPU_EMBED_DEBUG", str(level))
    with Embedder(bundle, "emulated") as embedder:
        embedder.embed(["a", "two cats on a sofa", "a red car " * 6])


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_each_level_adds_its_lines_to_those_below(
    level: int,
    tiny_bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    say(level, tiny_bundle, monkeypatch)
    out, err = capsys.readouterr()
    assert out == ""
    assert {line["event"] for line in lines(err)} == set().union(*LADDER[:level])


def test_nothing_is_said_unless_asked(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    say(0, tiny_bundle, monkeypatch)
    assert capsys.readouterr() == ("", "")
    assert not any(isinstance(one, DebugLines) for one in events.listeners)


def test_there_is_a_line_a_run_as_counted(
    tiny_bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    slots: Slots,
) -> None:
    slots(1)
    monkeypatch.setenv("NPU_EMBED_DEBUG", "3")
    with Embedder(tiny_bundle, "emulated") as embedder:
        embedder.embed(["a", "two cats on a sofa"])
        stats = embedder.stats
    said = lines(capsys.readouterr().err)
    runs = [line for line in said if line["event"] == "run"]
    assert len(runs) == stats.runs
    assert sum(int(run["switch"]) for run in runs) == stats.switches
    assert sum(int(run["swap"]) for run in runs) == stats.swaps > 0
    dropped = Counter(line["why"] for line in said if line["event"] == "drop")
    assert dropped == {"swap": stats.swaps, "release": 1}
    assert sum(line["event"] == "load" for line in said) == stats.loads
    assert sum(line["event"] == "patch" for line in said) == stats.patches


def test_runs_of_a_list_have_the_list_s_time_and_no_own(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    say(2, tiny_bundle, monkeypatch)
    runs = [line for line in lines(capsys.readouterr().err) if line["event"] == "run"]
    alone = [run for run in runs if run["list"] == "no"]
    listed = [run for run in runs if run["list"] != "no"]
    assert alone
    assert listed
    assert all("us" in run and "list_us" not in run for run in alone)
    assert all("list_us" in run and "us" not in run for run in listed)
    assert [run["list"] for run in listed if run["kernel"].startswith("mha")][:3] == [
        "1/3",
        "2/3",
        "3/3",
    ]
    run = alone[0]
    assert (run["kernel"], run["context"]) == ("qkv_r48", "gemm.xclbin")
    assert int(run["rows"]) <= int(run["padded_rows"]) == 48


def test_level_4_shows_the_stream_that_is_loaded(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    say(4, tiny_bundle, monkeypatch)
    said = lines(capsys.readouterr().err)
    ops = [line["op"] for line in said if line["event"] == "op" and line["kernel"] == "qkv_r48"]
    assert ops[0].startswith("WRITE (0,2) core")
    assert ops[-1].startswith("SYNC")


def test_values_with_spaces_quotes_or_controls_stay_one_value_on_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    DebugLines(1).note(events.Opened('a "b"\nevent=run', "bert", "npu", ""))
    (line,) = lines(capsys.readouterr().err)
    assert line["bundle"] == "a ?b??event=run"
    assert line["name"] == ""


def test_the_lines_are_records_of_a_logger_of_their_own() -> None:
    kept: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            kept.append(record)

    handler = Keep()
    logger().addHandler(handler)
    try:
        DebugLines(3).note(events.ContextDropped("gemm.xclbin", "swap", 0.0))
    finally:
        logger().removeHandler(handler)
    assert [record.name for record in kept] == ["npu_embed.debug"]
    assert kept[0].getMessage().endswith("context=gemm.xclbin why=swap")
    assert "NPU_EMBED_DEBUG" in settings.VARIABLES
