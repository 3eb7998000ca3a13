"""What the lint says of streams and bundles, in `inspect --lint` and at export."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from bundle_edits import edited
from commandline import run
from handmade import Push, bd, rtp, wait

from npu_embed.bundle import Bundle
from npu_embed.emulator import txn
from npu_embed.errors import BundleError
from npu_embed.exporters import export_checkpoint, exporter
from npu_embed.lint import LintFinding, check_lint, lint
from npu_embed.streamlint import problems

VIEWS = {"A": 64, "B": 64, "C": 64}
C_OUT = Push(0, "S2MM0", 2, bd(64))
SOUND = [rtp(0, 0, 0, 1), *C_OUT.ops(), *Push(0, "MM2S0", 0, bd(64)).ops(), wait(0)]
Ops = Sequence[txn.Op]


def said(ops: Ops, *, array_programs: bool = True) -> list[str]:
    stream = txn.assemble(ops, dev_gen=4, num_cols=8)
    return list(problems(stream, VIEWS, array_programs=array_programs))


def other(raw: tuple[int, ...]) -> txn.Op:
    """An operation that only decodes, here at no place."""
    header = (0x06040100, 0x00000108, 1, 16 + 4 * len(raw))
    words = b"".join(word.to_bytes(4, "little") for word in (*header, *raw))
    (op,) = txn.decode(words).ops
    return op


SPARE = txn.address(0, 2, 0x2000)  # core memory that no program uses
LOADPDI, READ_REGS = other((8, 0, 0, 0)), other((130, 8))


def test_of_a_sound_stream_nothing_is_said() -> None:
    assert said(SOUND) == []


@pytest.mark.parametrize(
    ("ops", "words"),
    [
        ([LOADPDI, *SOUND], "op 0 at word 4 is LOADPDI, which the emulated array cannot execute"),
        ([*SOUND, READ_REGS], "is READ_REGS, which the emulated array cannot execute"),
        (
            [*Push(1, "MM2S0", 3, bd(8)).ops(), *SOUND],
            "op 1 at word 16 patches in buffer 3, the kernel has 3 (A, B, C)",
        ),
        (
            [*Push(0, "S2MM0", 2, bd(64), offset_bytes=4).ops(), wait(0)],
            "moves 65 words of C (buffer 2), its view has 64",
        ),
        (
            [*Push(0, "S2MM0", 2, bd(8, (4, 1), (2, 100))).ops(), wait(0)],
            "moves 104 words of C (buffer 2), its view has 64",
        ),
        ([*SOUND, wait(0)], "waits for a token of S2MM0 of column 0 that nothing before it sends"),
        ([wait(0), *C_OUT.ops(), wait(0)], "op 0 at word 4 waits for a token of S2MM0 of column 0"),
        ([*SOUND, wait(1)], "waits for a token of S2MM0 of column 1 that nothing before it sends"),
        ([*SOUND, wait(0, 1)], "waits for a token of S2MM1 of column 0"),
        (SOUND[:-1], "1 tokens of S2MM0 of column 0 are sent and never awaited"),
        (
            [*Push(0, "MM2S0", 0, bd(8), token=True).ops(), *SOUND],
            "1 tokens of MM2S0 of column 0 are sent and never awaited",
        ),
        (
            Push(0, "S2MM0", 2, bd(64), token=False).ops(),
            "the last push of S2MM0 of column 0 sends no token: nothing waits for its results",
        ),
    ],
)
def test_a_flaw_is_said_once_with_its_place(ops: Ops, words: str) -> None:
    found = said(list(ops))
    assert len(found) == 1, found
    assert words in found[0]


def test_operations_of_real_cores_are_no_flaw_where_real_cores_run_them() -> None:
    assert said([LOADPDI, *SOUND, READ_REGS], array_programs=False) == []


def test_a_token_may_be_awaited_by_a_rectangle_of_columns() -> None:
    pushes = [op for col in range(2) for op in Push(col, "S2MM0", 2, bd(8)).ops()]
    both = txn.sync(direction=0, row=0, col=0, nrow=1, ncol=2, channel=0)
    assert said([*pushes, both]) == []


def test_of_channels_of_memory_tiles_nothing_is_said() -> None:
    memtile = txn.sync(direction=0, row=1, col=0, nrow=1, ncol=1, channel=3)
    assert said([*SOUND, memtile]) == []


# -- bundles


def with_stream(folder: Path, file: str, change: Callable[[list[txn.Op]], Ops]) -> Path:
    """A bundle's folder with other operations in a stream."""
    path = folder / file
    ops = change(list(txn.decode(path.read_bytes()).ops))
    path.write_bytes(txn.assemble(ops, dev_gen=4, num_cols=8).encode())
    return folder


def found_in(folder: Path) -> list[LintFinding]:
    bundle = Bundle.open(folder)
    try:
        return list(lint(bundle))
    finally:
        bundle.close()


@pytest.mark.parametrize(
    "bundle",
    [
        "tiny_bundle",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("eg2_bundle", "gemma3_host_bundle", "published_bundle")
        ),
    ],
)
def test_what_the_exporter_makes_is_sound(bundle: str, request: pytest.FixtureRequest) -> None:
    assert found_in(request.getfixturevalue(bundle)) == []


MHA, UP = "kernels/mha_16.insts.bin", "kernels/up_x2.insts.bin"


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        (UP, lambda ops: ops[:-1], "tokens of S2MM0 of column 2 are sent and never awaited"),
        (UP, lambda ops: [*ops, LOADPDI], "is LOADPDI"),
        (MHA, lambda ops: [*ops, ops[-1]], "that nothing before it sends"),
        (
            MHA,
            lambda ops: [txn.block_write(SPARE, [0]), *ops],
            "no value of a WRITE",
        ),
    ],
)
def test_a_flaw_of_a_stream_is_found_with_file_and_line(
    tiny_copy: Path, file: str, change: Callable[[list[txn.Op]], Ops], words: str
) -> None:
    (finding,) = found_in(with_stream(tiny_copy, file, change))
    assert finding.file == file
    manifest = (tiny_copy / "manifest.txt").read_text().splitlines()
    assert f"insts={file}" in manifest[finding.line - 1]
    assert words in finding.text


@pytest.mark.parametrize(
    ("change", "file", "words"),
    [
        (("o_elems=1024 ", "o_elems=1000 "), MHA, "moves 512 words of O (buffer 3), its view has"),
        (("o_elems=1024 kv_words=14,", "o_elems=1024 kv_words=15,"), MHA,
         "kv word 15 is no value of a WRITE"),
        (("\nxclbin mha", "\nxclbin more kernels/mha.xclbin MLIR_AIE\nxclbin mha"),
         "kernels/mha.xclbin", "no kernel is in xclbin more"),
        (("mha.xclbin MLIR_AIE", "mha.xclbin OTHER"), "kernels/mha.xclbin", "wanted OTHER"),
    ],
)  # fmt: skip
def test_a_flaw_of_the_manifest_is_found(
    tiny_bundle: Path, tmp_path: Path, change: tuple[str, str], file: str, words: str
) -> None:
    findings = found_in(edited(tiny_bundle, tmp_path / "bundle", change))
    assert [(f.file, words in f.text) for f in findings] == [(file, True)], findings


def test_a_damaged_stream_does_not_hide_the_next_one(tiny_copy: Path) -> None:
    for file in (UP, MHA):
        (tiny_copy / file).write_bytes(bytes(2048))
    assert [finding.file for finding in found_in(tiny_copy)] == [UP, MHA]


@pytest.mark.slow
def test_inspect_prints_findings_and_exits_with_1(tiny_copy: Path) -> None:
    assert run("inspect", "--lint", tiny_copy).out == "0 findings\n"
    with_stream(tiny_copy, UP, lambda ops: ops[:-1])
    result = run("inspect", "--lint", tiny_copy)
    assert result.code == 1
    assert result.out.startswith(f"{UP} (manifest.txt:")
    assert result.out.endswith("1 finding\n")
    lines = [
        json.loads(line) for line in run("inspect", "--lint", "--json", tiny_copy).out.splitlines()
    ]
    assert lines[0]["file"] == UP
    assert lines[-1] == {"verdict": "FAIL", "findings": 1}


def test_only_a_bundle_can_be_linted(tiny_bundle: Path) -> None:
    result = run("inspect", "--lint", tiny_bundle / UP)
    assert result.code == 1
    assert "wanted a bundle to lint" in result.err


@pytest.mark.slow
def test_an_unsound_bundle_is_not_exported(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = exporter._write

    def write_badly(folder: Path, *rest: object) -> None:
        write(folder, *rest)  # type: ignore[arg-type]
        shutil.copy(folder / "kernels/up_x1.insts.bin", folder / UP)

    monkeypatch.setattr(exporter, "_write", write_badly)
    data = Path(__file__).parent.parent / "data/tiny-bert"
    with pytest.raises(BundleError, match=r"kernels/up_x2.insts.bin \(manifest.txt:\d+\): writes"):
        export_checkpoint(data, tmp_path / "out")
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_kernels_that_go_before_the_bundle_s_are_not_in_the_way_of_an_export(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    (kernels / "up_x2.insts.bin").write_bytes(bytes(4))
    monkeypatch.setenv("NPU_EMBED_KERNELS", str(kernels))
    bundle = Bundle.open(tiny_bundle)
    with pytest.raises(BundleError, match="no instruction stream"):
        check_lint(bundle)
    own = Bundle.open(tiny_bundle, overrides=False)
    check_lint(own)
