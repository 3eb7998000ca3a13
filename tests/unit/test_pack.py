"""Packed weights are read back here by counting bytes as docs/array-programs.md describes them."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from numpy.typing import NDArray

from npu_embed.exporters.pack import block_bytes, geglu_pair, pack_gemm


def distinct_weights(k: int, n: int) -> NDArray[np.float32]:
    """k x n different numbers that bfloat16 holds exactly."""
    bits = np.arange(1, k * n + 1, dtype=np.uint32)
    assert bits.max() < 0x7F80
    return (bits << 16).view(np.float32).reshape(k, n)


def unpack(
    packed: bytes, k: int, n: int, bias: bool, k_tile: int, n_tile: int
) -> tuple[NDArray[np.float32], list[float]]:
    """(B [padded k, padded n], bias [padded n]), one element after the other."""
    weights = np.full((k, n), np.nan, dtype=np.float32)
    biases: list[float] = []
    at = 0
    for n_block in range(n // n_tile):
        if bias:
            biases += struct.unpack_from(f"<{n_tile}f", packed, at)
            at += 4 * n_tile
        for k_block in range(k // k_tile):
            for column_group in range(n_tile // 8):
                for row_group in range(k_tile // 8):
                    for column in range(8):
                        for row in range(8):
                            (half,) = struct.unpack_from("<H", packed, at)
                            at += 2
                            value = struct.unpack("<f", struct.pack("<I", half << 16))[0]
                            i = k_block * k_tile + row_group * 8 + row
                            j = n_block * n_tile + column_group * 8 + column
                            assert np.isnan(weights[i, j]), "visited twice"
                            weights[i, j] = value
    assert at == len(packed)
    return weights, biases


@pytest.mark.parametrize(
    ("k", "n", "bias", "k_tile", "n_tile"),
    [
        (64, 64, True, 64, 64),
        (64, 64, False, 64, 64),
        (128, 192, True, 64, 64),
        (32, 48, True, 16, 8),
        (32, 48, False, 8, 24),
    ],
)
def test_every_weight_lies_where_the_array_looks_for_it(
    k: int, n: int, bias: bool, k_tile: int, n_tile: int
) -> None:
    weights = distinct_weights(k, n)
    biases = np.linspace(-1.0, 1.0, n, dtype=np.float32) if bias else None
    packed = pack_gemm(weights, biases, k_tile, n_tile)
    assert packed.dtype == np.uint8
    assert packed.ndim == 1
    found, found_bias = unpack(packed.tobytes(), k, n, bias, k_tile, n_tile)
    np.testing.assert_array_equal(found, weights)
    if biases is not None:
        np.testing.assert_array_equal(np.asarray(found_bias, np.float32), biases)


def test_ragged_weights_are_padded_with_zeros() -> None:
    weights, biases = distinct_weights(20, 70), np.ones(70, dtype=np.float32)
    found, found_bias = unpack(pack_gemm(weights, biases).tobytes(), 64, 128, True, 64, 64)
    wanted = np.zeros((64, 128), dtype=np.float32)
    wanted[:20, :70] = weights
    np.testing.assert_array_equal(found, wanted)
    assert found_bias == [1.0] * 70 + [0.0] * 58


@pytest.mark.parametrize(
    ("value", "bits"),
    [
        (1.00390625, 0x3F80),  # halfway between two: to the even one below
        (1.01171875, 0x3F82),  # halfway: to the even one above
        (1.00390637, 0x3F81),
        (-0.0, 0x8000),
    ],
)
def test_weights_are_rounded_to_nearest_even(value: float, bits: int) -> None:
    packed = pack_gemm(np.full((8, 8), value, dtype=np.float32), None, 8, 8)
    assert struct.unpack_from("<H", packed.tobytes())[0] == bits


def test_biases_stay_float32() -> None:
    third = np.float32(1 / 3)
    packed = pack_gemm(np.zeros((64, 64), np.float32), np.full(64, third, dtype=np.float32))
    assert packed[:256].view("<f4")[0] == third


def test_a_transposed_view_packs_as_its_copy() -> None:
    weights = distinct_weights(64, 128)
    np.testing.assert_array_equal(
        pack_gemm(weights.T, None), pack_gemm(np.ascontiguousarray(weights.T), None)
    )


@pytest.mark.parametrize("bias", [True, False])
def test_block_bytes_is_what_a_block_takes(bias: bool) -> None:
    biases = np.zeros(64, np.float32) if bias else None
    assert pack_gemm(np.zeros((128, 64), np.float32), biases).size == block_bytes(128, bias)


@pytest.mark.parametrize(
    ("shape", "bias", "tiles", "words"),
    [
        ((64,), None, (64, 64), r"shape \(64,\), wanted \[K, N\]"),
        ((0, 64), None, (64, 64), r"shape \(0, 64\)"),
        ((64, 64), (63,), (64, 64), r"bias has shape \(63,\), wanted \(64,\)"),
        ((64, 64), (64, 1), (64, 64), r"bias has shape \(64, 1\)"),
        ((64, 64), None, (60, 64), "tiles 60 x 64, wanted multiples of 8"),
        ((64, 64), None, (64, 0), "tiles 64 x 0"),
    ],
)
def test_what_does_not_fit_is_refused(
    shape: tuple[int, ...], bias: tuple[int, ...] | None, tiles: tuple[int, int], words: str
) -> None:
    biases = None if bias is None else np.zeros(bias, np.float32)
    with pytest.raises(ValueError, match=words):
        pack_gemm(np.zeros(shape, np.float32), biases, *tiles)


def test_a_pair_takes_turns_of_half_a_tile() -> None:
    gate = np.arange(2 * 70, dtype=np.float32).reshape(2, 70) + 1
    pair = geglu_pair(gate, -gate)
    assert pair.shape == (2, 256)
    turns = pair.reshape(2, 4, 2, 32)
    padded = np.zeros((2, 128), np.float32)
    padded[:, :70] = gate
    np.testing.assert_array_equal(turns[:, :, 0].reshape(2, 128), padded)
    np.testing.assert_array_equal(turns[:, :, 1].reshape(2, 128), -padded)


def test_a_pair_of_two_shapes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2, 3\) and \(2, 4\), wanted one shape"):
        geglu_pair(np.zeros((2, 3), np.float32), np.zeros((2, 4), np.float32))
