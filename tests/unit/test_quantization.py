"""Vectors in fewer bytes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from npu_embed import BundleError, InputError, InputTypeError
from npu_embed.quantization import (
    DTYPES,
    RANGES_FILE,
    Int8Ranges,
    bundle_ranges,
    numpy_dtype,
    quantize,
    width,
)

RANGES = Int8Ranges.of(np.array([[-1, 0], [1, 2]], dtype=np.float32))


def row(*values: float) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    return np.array([values], dtype=np.float32)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [(-1.0, -128), (1.0, 127), (0.0, 0), (-7.0, -128), (7.0, 127), (1e38, 127), (-1e38, -128)],
)
def test_int8_spans_the_range_and_saturates(value: float, wanted: int) -> None:
    found = quantize(row(value, 0), "int8", RANGES)
    assert found.dtype == np.int8
    assert found.tolist() == [[wanted, -128]]


def test_int8_of_a_vector_does_not_depend_on_its_company() -> None:
    vectors = np.random.default_rng(0).standard_normal((50, 2)).astype(np.float32)
    together = quantize(vectors, "int8", RANGES)
    alone = [quantize(vectors[i : i + 1], "int8", RANGES)[0] for i in range(50)]
    np.testing.assert_array_equal(together, np.stack(alone))


def test_int8_is_near_what_it_stands_for() -> None:
    values = np.linspace(-1, 1, 1001, dtype=np.float32)[:, None].repeat(2, axis=1)
    back = (quantize(values, "int8", RANGES)[:, 0] + 128.0) / 255 * 2 - 1
    assert np.abs(back - values[:, 0]).max() <= 1 / 255 + 1e-6  # half a step


def test_binary_packs_signs_with_the_first_number_in_the_highest_bit() -> None:
    found = quantize(row(1, -1, 0, 0.5, -0.0, 2, 3, -4), "binary")
    assert found.dtype == np.uint8
    assert found.tolist() == [[0b10010110]]


def test_a_float16_is_never_infinite() -> None:
    assert quantize(row(1e9, -1e9), "float16").tolist() == [[65504.0, -65504.0]]


def test_float32_is_the_vector() -> None:
    vectors = row(0.1, 0.2)
    assert quantize(vectors, "float32") is vectors


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_dtype_has_a_width_and_no_rows_stay_none(dtype: str) -> None:
    ranges = Int8Ranges(-np.ones(384, np.float32), np.ones(384, np.float32))
    found = quantize(np.zeros((0, 384), np.float32), dtype, ranges)
    assert found.shape == (0, width(dtype, 384))
    assert found.dtype == numpy_dtype(dtype)


@pytest.mark.parametrize(
    ("dim", "dtype", "words"),
    [
        (100, "binary", "100 dimensions, wanted a multiple of 8.*cut the vectors to 96"),
        (4, "binary", "4 dimensions, wanted a multiple of 8"),
        (2, "int8", "no ranges.*--calibrate FILE"),
        (2, "int4", "'int4': unknown, wanted float32, float16, int8, binary"),
    ],
)
def test_what_cannot_be_had_is_refused(dim: int, dtype: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        quantize(np.zeros((1, dim), np.float32), dtype)


def test_ranges_of_another_dim_are_refused() -> None:
    with pytest.raises(InputError, match="ranges of 2 dimensions, wanted 3"):
        quantize(row(1, 2, 3), "int8", RANGES)


@pytest.mark.parametrize(
    ("vectors", "error", "words"),
    [
        (np.zeros((0, 2), np.float32), InputError, "no vectors"),
        (np.zeros((1, 2), np.float32), InputError, "dimension 0 goes from 0 to 0"),
        (np.full((2, 1), np.nan, np.float32), InputError, "dimension 0 goes from nan"),
        (np.zeros(2, np.float32), InputTypeError, r"float32 \[2\]"),
        (np.zeros((2, 2), np.int64), InputTypeError, "int64"),
    ],
)
def test_vectors_that_give_no_ranges_are_refused(
    vectors: np.ndarray[tuple[int, ...], np.dtype[np.float32]], error: type, words: str
) -> None:
    with pytest.raises(error, match=words):
        Int8Ranges.of(vectors)


def test_a_bundle_may_have_ranges(tmp_path: Path) -> None:
    assert bundle_ranges(tmp_path) is None
    np.save(tmp_path / RANGES_FILE, RANGES.as_array())
    found = bundle_ranges(tmp_path)
    assert found is not None
    np.testing.assert_array_equal(found.as_array(), RANGES.as_array())


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"nonsense", b"PK\x03\x04"])
def test_damaged_ranges_of_a_bundle_are_its_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / RANGES_FILE).write_bytes(content)
    with pytest.raises(BundleError, match=RANGES_FILE):
        bundle_ranges(tmp_path)


def test_ranges_of_another_shape_are_the_bundles_error(tmp_path: Path) -> None:
    np.save(tmp_path / RANGES_FILE, np.zeros((3, 2), np.float32))
    with pytest.raises(BundleError, match=r"shape \[3, 2\]"):
        bundle_ranges(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<f4', 'fortran_order': False, 'shape':{'descr'",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 99999999999), }",
        "{'descr': '|O', 'fortran_order': False, 'shape': (2, 3), }",
        "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (2, 3), }",
        "[" * 90,
    ],
)
def test_a_header_numpy_cannot_read_is_refused(tmp_path: Path, header: str) -> None:
    text = header.ljust(117).encode() + b"\n"
    content = b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text + bytes(24)
    (tmp_path / RANGES_FILE).write_bytes(content)
    with pytest.raises(BundleError, match=r"int8_ranges.npy: .*wanted float32"):
        bundle_ranges(tmp_path)


def test_ranges_are_a_regular_file_of_the_bundle_of_a_sane_size(tmp_path: Path) -> None:
    bundle, outside = tmp_path / "bundle", tmp_path / "outside.npy"
    bundle.mkdir()
    np.save(outside, RANGES.as_array())
    place = bundle / RANGES_FILE
    place.symlink_to(outside)
    with pytest.raises(BundleError, match="a link that leads out of the bundle"):
        bundle_ranges(bundle)
    place.unlink()
    os.mkfifo(place)
    with pytest.raises(BundleError, match="not a regular file"):
        bundle_ranges(bundle)
    place.unlink()
    place.write_bytes(outside.read_bytes())
    os.truncate(place, 17 << 20)
    with pytest.raises(BundleError, match="17825792 bytes"):
        bundle_ranges(bundle)
