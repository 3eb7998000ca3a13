"""How much a stream moves, and streams for other rows than their record says."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bundle_edits import with_tensors

from npu_embed import models, streamcheck
from npu_embed.bundle import Bundle
from npu_embed.device import Session
from npu_embed.emulator import txn
from npu_embed.errors import BundleError
from npu_embed.exporters.geometry import Epilogue
from npu_embed.exporters.streams import gemm_stream
from npu_embed.specs import GemmSpec, GemmStream

SPEC = GemmSpec(
    key="up",
    ctx="gemm",
    streams=(
        GemmStream("up_r16", 16, "r16", 0, 0, 10),
        GemmStream("up", 64, "x1", 0, 0, 7),
        GemmStream("up_r96", 96, "r96", 0, 0, 11),
        GemmStream("up_x2", 128, "x2", 0, 0, 8),
        GemmStream("up_x3", 192, "x3", 0, 0, 9),
    ),
    M=64,
    K=64,
    N=256,
    lda=64,
    c_stride=256,
    n_out=256,
    line=7,
)
MEMTILE = txn.address(0, 1, 0xA0634)  # a task queue of the memory tile


def stream(
    chunks: int, epilogue: Epilogue = Epilogue.NONE, *, rows_per_core: int = 16, k: int = SPEC.K
) -> txn.Stream:
    """The exporter's stream of SPEC."""
    strides = k, SPEC.c_stride
    return gemm_stream(chunks, k, SPEC.N, *strides, epilogue, True, 4, rows_per_core)


def problem(file: str, found: txn.Stream, *, exact: bool = True) -> str | None:
    return streamcheck.find_problem(SPEC, file, found, exact=exact)


def with_op(made: txn.Stream, op: txn.Op) -> txn.Stream:
    return txn.assemble([op, *made.ops], dev_gen=4, num_cols=8)


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_a_stream_that_writes_its_rows_is_sound(chunks: int) -> None:
    made = stream(chunks)
    assert problem(f"x{chunks}", made) is None
    assert streamcheck.words_out(made) == chunks * 64 * 256 // 2
    block_bytes = 64 * 4 + 64 * 64 * 2  # bias and one tile of B
    assert streamcheck.packed_bytes(made) == 4 * block_bytes


@pytest.mark.parametrize(("file", "chunks", "rows_per_core"), [("r16", 1, 4), ("r96", 2, 12)])
def test_a_stream_of_rows_between_chunks_is_sound(
    file: str, chunks: int, rows_per_core: int
) -> None:
    made = stream(chunks, rows_per_core=rows_per_core)
    assert problem(file, made) is None
    assert streamcheck.packed_bytes(made) == streamcheck.packed_bytes(stream(1))


@pytest.mark.parametrize(
    ("file", "rows", "line", "chunks", "rows_per_core"),
    [
        ("x2", 128, 8, 1, 16),
        ("x1", 64, 7, 2, 16),
        ("x3", 192, 9, 2, 16),
        ("r16", 16, 10, 1, 16),
        ("r16", 16, 10, 1, 8),
        ("r96", 96, 11, 2, 16),
        ("x1", 64, 7, 1, 4),
    ],
)
def test_a_stream_of_other_rows_is_told_with_both_numbers(
    file: str, rows: int, line: int, chunks: int, rows_per_core: int
) -> None:
    found = problem(file, stream(chunks, rows_per_core=rows_per_core))
    assert found is not None
    written = chunks * 4 * rows_per_core * 128
    assert found.startswith(
        f"{file}: writes {written} words of C, wanted {rows * 128} for {rows} rows"
    )
    assert f"(manifest.txt:{line}, gemm up)" in found


def test_where_the_record_does_not_say_the_columns_half_of_them_may_be_left() -> None:
    pairs = stream(2, Epilogue.GEGLU_PAIR)
    assert problem("x2", pairs) is not None
    assert problem("x2", pairs, exact=False) is None
    assert problem("x3", pairs, exact=False) is not None


def test_rows_further_apart_than_they_are_wide_are_counted_by_their_width() -> None:
    made = gemm_stream(2, 64, 256, 64, 512, Epilogue.NONE, False, 4)
    assert streamcheck.words_out(made) == 2 * 64 * 256 // 2


@pytest.mark.parametrize(
    "op",
    [
        txn.write(MEMTILE, 1),
        txn.write(txn.address(0, 0, 0x1D204), 3),  # pushes a descriptor that was not written
        txn.write(txn.address(0, 0, 0x1D000), 3),  # a part of a descriptor
        txn.mask_write(txn.address(0, 0, 0x1D000), 3, 3),
        txn.block_write(txn.address(0, 0, 0x1D000), [1, 2, 3]),
        txn.block_write(txn.address(0, 0, 0x1D1E0), [0] * 16),  # past the last descriptor
        txn.ddr_patch(txn.address(0, 0, 0x1D1E4), 2, 0),
    ],
)
def test_of_a_stream_that_does_more_nothing_is_said(op: txn.Op) -> None:
    made = with_op(stream(1), op)
    assert streamcheck.moves(made) is None
    assert problem("x3", made) is None
    assert streamcheck.packed_bytes(made) is None


def test_a_descriptor_that_chains_to_another_is_not_understood() -> None:
    made = stream(1)
    ops = [
        txn.block_write(op.address, (*op.data[:7], op.data[7] | 1 << 26))
        if isinstance(op, txn.BlockWrite)
        else op
        for op in made.ops
    ]
    assert streamcheck.moves(txn.assemble(ops, dev_gen=4, num_cols=8)) is None


# --- in a bundle --------------------------------------------------------------------------------


@pytest.mark.parametrize(("own", "other"), [("up_x2", "up_x1"), ("up_r16", "up_x1")])
def test_a_bundle_refuses_the_stream_of_other_rows(tiny_copy: Path, own: str, other: str) -> None:
    kernels = tiny_copy / "kernels"
    shutil.copyfile(kernels / f"{other}.insts.bin", kernels / f"{own}.insts.bin")
    bundle = Bundle.open(tiny_copy)
    gemm = bundle.specs.gemms["up"]
    bundle.stream(gemm, f"kernels/{other}.insts.bin")
    with pytest.raises(BundleError, match=rf"{own}.insts.bin: writes \d+ words of C, wanted \d+"):
        bundle.stream(gemm, f"kernels/{own}.insts.bin")


def test_a_bundle_refuses_a_stream_that_reads_other_weights(tiny_copy: Path) -> None:
    spec = Bundle.open(tiny_copy).specs.gemms["up"]
    longer = gemm_stream(1, 2 * spec.K, spec.N, 2 * spec.K, spec.c_stride, 0, True, 4, 4)
    (tiny_copy / "kernels/up_r16.insts.bin").write_bytes(longer.encode())
    bundle = Bundle.open(tiny_copy)
    gemm = bundle.specs.gemms["up"]
    bundle.stream(gemm, "kernels/up_x1.insts.bin")
    line = gemm.stream_of("kernels/up_r16.insts.bin").line
    with pytest.raises(BundleError) as info:
        bundle.stream(gemm, "kernels/up_r16.insts.bin")
    read, wanted = (3 * (64 * 4 + k * 64 * 2) for k in (128, 64))
    assert str(info.value) == (
        f"kernels/up_r16.insts.bin: reads {read} bytes of B, wanted {wanted} as the other streams "
        f"of gemm up (manifest.txt:{line}); re-export the bundle."
    )


def test_a_stream_sound_for_one_record_is_checked_for_another_too(tiny_bundle: Path) -> None:
    bundle = Bundle.open(tiny_bundle)
    gemm = bundle.specs.gemms["up"]
    file = gemm.streams[0].insts
    bundle.stream(gemm, file)
    other = replace(gemm, n_out=gemm.n_out // 2, line=gemm.line + 1)
    with pytest.raises(BundleError, match="words of C"):
        bundle.stream(other, file)


@pytest.mark.parametrize("size", [0, 64, 1 << 20])
def test_a_packed_weight_of_another_size_is_named(
    tiny_bundle: Path, tmp_path: Path, size: int
) -> None:
    name = "encoder.layer.1.up.packed"
    path = with_tensors(tiny_bundle, tmp_path / "b", {name: np.zeros(size, np.uint8)})
    bundle = Bundle.open(path)
    with pytest.raises(
        BundleError, match=rf"tensor {name} has {size} bytes, wanted \d+ as gemm up"
    ):
        models.load(Session.open("emulated"), bundle, bundle.max_rows)
