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
from npu_embed.specs import GemmSpec

SPEC = GemmSpec(
    key="up",
    ctx="gemm",
    insts=("x1", "x2", "x3"),
    M=64,
    K=64,
    N=256,
    lda=64,
    c_stride=256,
    n_out=256,
    a_elems=(0, 0, 0),
    c_elems=(0, 0, 0),
    line=7,
)
MEMTILE = txn.address(0, 1, 0xA0634)  # a task queue of the memory tile


def stream(chunks: int, epilogue: Epilogue = Epilogue.NONE) -> txn.Stream:
    """The exporter's stream of SPEC."""
    return gemm_stream(chunks, SPEC.K, SPEC.N, SPEC.lda, SPEC.c_stride, epilogue, True, 4)


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


@pytest.mark.parametrize(("file", "chunks"), [("x2", 1), ("x1", 2), ("x3", 2)])
def test_a_stream_of_other_rows_is_told_with_both_numbers(file: str, chunks: int) -> None:
    rows = 64 * int(file[1:])
    found = problem(file, stream(chunks))
    assert found is not None
    assert found.startswith(
        f"{file}: writes {chunks * 8192} words of C, wanted {rows * 128} for {rows} rows"
    )
    assert "(manifest.txt:7, gemm up)" in found


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


def test_a_bundle_refuses_the_stream_of_fewer_rows(tiny_copy: Path) -> None:
    kernels = tiny_copy / "kernels"
    shutil.copyfile(kernels / "up_x1.insts.bin", kernels / "up_x2.insts.bin")
    bundle = Bundle.open(tiny_copy)
    gemm = bundle.specs.gemms["up"]
    bundle.stream(gemm, gemm.insts[0])
    with pytest.raises(BundleError, match=r"up_x2.insts.bin: writes \d+ words of C, wanted \d+"):
        bundle.stream(gemm, gemm.insts[1])


def test_a_stream_sound_for_one_record_is_checked_for_another_too(tiny_bundle: Path) -> None:
    bundle = Bundle.open(tiny_bundle)
    gemm = bundle.specs.gemms["up"]
    bundle.stream(gemm, gemm.insts[0])
    other = replace(gemm, n_out=gemm.n_out // 2, line=gemm.line + 1)
    with pytest.raises(BundleError, match="words of C"):
        bundle.stream(other, gemm.insts[0])


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
