"""What `inspect` tells of bundles, xclbins and instruction streams."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from commandline import run

from npu_embed.bundle import Bundle
from npu_embed.emulator import txn, xclbin

STREAM = txn.assemble(
    [
        txn.write(txn.address(1, 2, 0x404), 16),
        txn.write(txn.address(0, 0, 0x1D204), 0x80010003),
        txn.ddr_patch(txn.address(0, 0, 0x1D064), 2, 0x40),
        txn.sync(0, 0, 0, 1, 1, 0),
    ],
    dev_gen=4,
    num_cols=8,
)
LEGACY = np.array(
    [
        *(0x060304A6, 0, 1, 2, 0, 0x00600005, 0x80800007, 9, 0x2CD0000C, 0x2E107041),
        *(0x02030400, 0x0001D204, 0x42),
        *(0x03030401, 0x05010200),
    ],
    "<u4",
).tobytes()
TEXT_FORM = b"# made by a compiler\n" + b"".join(
    b"%08X\n" % word for word in np.frombuffer(STREAM.encode(), "<u4")
)
WRAPPED = np.array([0, len(STREAM.encode()) + 8], "<u4").tobytes() + STREAM.encode()


@pytest.fixture
def copy(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A copy of the tiny bundle, to be changed."""
    return Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))


# Bundles


def test_a_bundle_is_told_in_tables(tiny_bundle: Path) -> None:
    result = run("inspect", tiny_bundle)
    assert (result.code, result.err) == (0, "")
    rows = [line.split() for line in result.out.splitlines()]
    assert ["name", "tiny-bert"] in rows
    assert ["gemm", "kernels/gemm.xclbin", "MLIR_AIE", "4", "gemm"] in [row[:5] for row in rows]
    qkv = ["qkv", "gemm", "32", "64", "64", "192", "192", "64", "192"]
    assert [*qkv, "16", "32", "48", "96", "none"] in [row[:14] for row in rows]
    assert ["128", "mha", "mha"] in [row[:3] for row in rows]
    assert "14 44 74 104 ... (16)" in result.out
    assert "tensors.safetensors: 47," in result.out


def test_words_are_told_in_full_where_asked(tiny_bundle: Path) -> None:
    out = run("inspect", "--words", tiny_bundle).out
    assert "..." not in out
    assert all(f" {word}" in out for word in (14, 464, 20, 470))


def test_a_bundle_is_told_in_json(tiny_bundle: Path) -> None:
    (told,) = run("inspect", "--json", tiny_bundle).json_lines
    bundle = Bundle.open(tiny_bundle)
    assert told["kind"] == "bundle"
    assert told["params"] == dict(bundle.manifest.params)
    assert [c["key"] for c in told["contexts"]] == ["gemm", "mha"]
    assert [c["columns"] for c in told["contexts"]] == [4, 4]
    assert told["contexts"][1]["programs"][0]["heads"] == 4
    for gemm in told["gemms"]:
        spec = bundle.specs.gemms[gemm["key"]]
        assert (gemm["M"], gemm["K"], gemm["N"]) == (spec.M, spec.K, spec.N)
        assert (gemm["chunks"], gemm["max_rows"]) == (32, 2048)
        assert gemm["rows"] == [stream.rows for stream in spec.streams]
        assert gemm["a_elems"] == [stream.a_elems for stream in spec.streams]
        assert gemm["c_elems"] == [stream.c_elems for stream in spec.streams]
        files = [tiny_bundle / stream.insts for stream in spec.streams]
        assert gemm["stream_words"] == [file.stat().st_size // 4 for file in files]
    assert [tuple(m["kv_words"]) for m in told["mha"]] == [m.kv_words for m in bundle.specs.mhas]
    assert told["tensors"]["count"] == len(bundle.tensors.names())
    assert sum(t["bytes"] for t in told["tensors"]["dtypes"].values()) == told["tensors"]["bytes"]
    assert told["references"] == 6
    bundle.close()


def test_a_bundle_s_prompts_are_told(copy: Path) -> None:
    manifest = copy / "manifest.txt"
    with manifest.open("a", encoding="utf-8") as file:
        file.write(f"prompt query {b'query: '.hex()}\n")
    assert "'query: '" in run("inspect", copy).out
    assert run("inspect", copy, "--json").json_lines[0]["prompts"] == {"query": "query: "}


def test_a_stranger_s_words_cannot_move_the_terminal_s_cursor(copy: Path) -> None:
    with (copy / "manifest.txt").open("a", encoding="utf-8") as file:
        file.write("param note \x1b[2J[bold]\x07\n")
    out = run("inspect", copy).out
    assert "\ufffd[2J[bold]\ufffd" in out
    assert "\x1b" not in out


def test_a_context_of_another_maker_holds_code_for_real_cores(copy: Path) -> None:
    image = bytes.fromhex("DD00000044332211") + bytes(56)
    (copy / "kernels" / "gemm.xclbin").write_bytes(xclbin.build(pdi_image=image))
    assert "code for real cores" in run("inspect", copy).out
    (told,) = run("inspect", copy, "--json").json_lines
    assert told["contexts"][0]["programs"] == [None]


# Xclbins


def test_an_xclbin_is_told_in_tables_whatever_its_name(tiny_bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "kernel.txt"
    shutil.copyfile(tiny_bundle / "kernels" / "mha.xclbin", path)
    result = run("inspect", path)
    assert (result.code, result.err) == (0, "")
    container = xclbin.read(path)
    assert container.uuid in result.out
    assert "AIE_PARTITION" in result.out
    rows = [line.split() for line in result.out.splitlines()]
    assert ["1", "instr", "char", "*", "global", "8", "8", "1"] in rows
    assert ["1", "SRAM", "2"] in [row[:3] for row in rows]
    assert "heads=4" in result.out
    assert "DPU kernel 0x901" in result.out


def test_an_xclbin_is_told_in_json(tiny_bundle: Path) -> None:
    path = tiny_bundle / "kernels" / "gemm.xclbin"
    (told,) = run("inspect", "--json", path).json_lines
    container = xclbin.read(path)
    assert container.partition is not None
    assert told["uuid"] == container.uuid
    assert [s["kind_name"] for s in told["sections"]] == [s.kind_name for s in container.sections]
    names = ["opcode", "instr", "ninstr", "bo0", "bo1", "bo2", "bo3", "bo4"]
    assert [argument["name"] for argument in told["kernels"][0]["args"]][:8] == names
    assert told["kernels"][0]["pdi"] == told["partition"]["pdis"][0]["uuid"]
    assert told["partition"]["pdis"][0]["array_program"]["program"] == "gemm"
    assert told["partition"]["pdis"][0]["size_bytes"] == len(container.partition.pdis[0].image)


# Instruction streams


@pytest.mark.parametrize(
    ("content", "form"),
    [
        (STREAM.encode(), "TXN instruction stream, binary"),
        (WRAPPED, "TXN instruction stream, binary, wrapped"),
        (TEXT_FORM, "TXN instruction stream, text"),
    ],
)
def test_a_stream_is_disassembled_in_any_form(tmp_path: Path, content: bytes, form: str) -> None:
    path = tmp_path / "insts.xclbin"  # the name means nothing
    path.write_bytes(content)
    result = run("inspect", path)
    assert (result.code, result.err) == (0, "")
    assert f": {form}, " in result.out
    assert "version 0.1, dev_gen 4 (npu2), 8 columns, 6 rows" in result.out
    assert "4 ops: 2 WRITE, 1 DDR_PATCH, 1 SYNC" in result.out
    assert "WRITE         (1,2) core data memory +0x404 = 0x00000010" in result.out
    assert "(0,0) shim queue S2MM0 = 0x80010003 (BD 3, repeat 1, token)" in result.out
    assert "DDR_PATCH     (0,0) shim BD 3 word 1 = argument 2 + 0x40" in result.out


def test_a_stream_s_words_are_told_where_asked(tmp_path: Path) -> None:
    path = tmp_path / "insts.bin"
    path.write_bytes(STREAM.encode())
    out = run("inspect", "--words", path).out
    assert "\n        00000080 00000010 00000000 00010100\n" in out
    (told,) = run("inspect", "--words", "--json", path).json_lines
    assert [tuple(words) for words in told["op_words"]] == [op.raw for op in STREAM.ops]
    assert "op_words" not in run("inspect", "--json", path).json_lines[0]


def test_a_stream_is_told_in_json(tmp_path: Path) -> None:
    path = tmp_path / "insts.bin"
    path.write_bytes(STREAM.encode())
    (told,) = run("inspect", "--json", path).json_lines
    assert told["kind"] == "insts"
    assert told["header"]["num_ops"] == 4
    assert told["header"]["size_bytes"] == len(STREAM.encode())
    assert told["ops"] == {"WRITE": 2, "DDR_PATCH": 1, "SYNC": 1}
    assert told["buffers"] == [2]
    assert told["disassembly"] == list(txn.disassemble(STREAM))


def test_a_stream_older_than_txn_is_disassembled_too(tmp_path: Path) -> None:
    path = tmp_path / "insts.bin"
    path.write_bytes(LEGACY)
    out = run("inspect", path).out
    assert "older than TXN, binary, without prolog, 15 words, buffers 10" in out
    assert "     0  WRITEBD       (3,0) shim BD 6 = argument 10, 8 words: 00000001 00000002" in out
    assert "    10  WRITE         (3,4) core BD" not in out
    assert "(3,4) core " in out
    assert "    13  SYNC          (3,4) MM2S5, 1 columns x 2 rows" in out
    (told,) = run("inspect", "--json", path).json_lines
    assert told["header"] is None


def test_every_stream_of_a_bundle_can_be_told(tiny_bundle: Path) -> None:
    for path in sorted((tiny_bundle / "kernels").glob("*_x3.insts.bin")):
        assert run("inspect", path).code == 0


# What cannot be told


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty, wanted a bundle folder, an xclbin or an instruction stream"),
        (b"root:x:0:0\n", "begins 726f6f74 3a783a30 3a300a, wanted a bundle folder"),
        (b"\x7fELF\0\0\0\0", "begins 7f454c46 00000000, wanted a bundle folder"),
        (b"\0\0\0", "3 bytes, wanted a multiple of 4"),
        (b"xclbin2\0" + bytes(8), "file: "),
        (STREAM.encode()[:-4], "size"),
    ],
)
def test_a_file_that_is_none_of_these_is_an_error(
    tmp_path: Path, content: bytes, words: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    result = run("inspect", path)
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith(f"error: {path}: ")
    assert words in result.err
    assert result.err.count("\n") == 1


def test_a_folder_without_a_manifest_is_an_error(tmp_path: Path) -> None:
    result = run("inspect", tmp_path)
    assert result.code == 1
    assert f"{tmp_path}: a folder without manifest.txt, wanted a bundle; make one" in result.err


def test_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", "a\0b", "x" * 5000):
        result = run("inspect", path)
        assert result.code == 1
        assert "wanted a bundle, an xclbin or an instruction stream" in result.err


def test_a_fifo_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert "not a regular file" in run("inspect", tmp_path / "fifo").err


def test_a_damaged_bundle_is_an_error_with_file_and_line(copy: Path) -> None:
    manifest = copy / "manifest.txt"
    text = manifest.read_text(encoding="utf-8")
    manifest.write_text(text.replace("M=64 ", "M=0 ", 1), encoding="utf-8")
    result = run("inspect", copy)
    assert (result.code, result.out) == (1, "")
    line = next(i for i, row in enumerate(text.splitlines(), 1) if row.startswith("gemm qkv"))
    assert f"manifest.txt:{line}: gemm M is '0'" in result.err


def test_only_an_xclbin_may_be_large(tiny_bundle: Path, tmp_path: Path) -> None:
    large = tmp_path / "large"
    for content, most in ((b"", 16 << 20), (b"xclbin2\0", 256 << 20)):
        large.write_bytes(content)
        os.truncate(large, most + 1)
        result = run("inspect", large)
        assert result.code == 1
        assert f"{most + 1} bytes, wanted" in result.err
        assert f"at most {most}" in result.err
