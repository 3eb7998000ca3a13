"""tensors.txt and tensors.bin: what is written is read back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from npu_embed import BundleError
from npu_embed.tensors import TENSORS_BIN, TENSORS_TXT, open_tensors
from npu_embed.tensors_txt import write_tensors_txt

ARRAYS: dict[str, NDArray[np.generic]] = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "t0.bits": np.arange(5, dtype=np.uint16),
    "packed": np.arange(7, dtype=np.uint8),
    "ids": np.array([[-1, 2]], dtype=np.int32),
}


def test_tensors_are_read_back_in_order_and_aligned(tmp_path: Path) -> None:
    write_tensors_txt(tmp_path, ARRAYS, ["t0.bits"])
    table = (tmp_path / TENSORS_TXT).read_text()
    assert table == "a f32 2,3 0 24\nt0.bits bf16 5 64 10\npacked u8 7 128 7\nids i32 1,2 192 8\n"
    assert (tmp_path / TENSORS_BIN).stat().st_size == 200
    tensors = open_tensors(tmp_path)
    assert tensors.names() == tuple(ARRAYS)
    np.testing.assert_array_equal(tensors.f32("a"), ARRAYS["a"])
    np.testing.assert_array_equal(tensors.bf16("t0.bits"), ARRAYS["t0.bits"])
    np.testing.assert_array_equal(tensors.u8("packed"), ARRAYS["packed"])
    np.testing.assert_array_equal(tensors.i32("ids"), ARRAYS["ids"])


def test_an_array_in_another_order_is_written_by_rows(tmp_path: Path) -> None:
    write_tensors_txt(tmp_path, {"a": ARRAYS["a"].T})
    np.testing.assert_array_equal(open_tensors(tmp_path).f32("a", (3, 2)), ARRAYS["a"].T)


@pytest.mark.parametrize(
    ("name", "array", "bf16"),
    [
        ("a", np.zeros(3, np.float64), []),
        ("a", np.zeros(3, np.uint16), []),
        ("a", np.zeros(3, np.float32), ["a"]),
        ("a", np.zeros(3, ">f4"), []),
        ("a", np.zeros((), np.float32), []),
        ("a b", np.zeros(3, np.float32), []),
        ("", np.zeros(3, np.float32), []),
    ],
)
def test_what_the_format_cannot_hold_is_refused(
    tmp_path: Path, name: str, array: NDArray[np.generic], bf16: list[str]
) -> None:
    with pytest.raises(ValueError, match="wanted float32"):
        write_tensors_txt(tmp_path, {name: array}, bf16)


def test_an_alias_reads_the_tensor_and_errors_have_the_name_in_the_file(tmp_path: Path) -> None:
    write_tensors_txt(tmp_path, ARRAYS, ["t0.bits"])
    plain = open_tensors(tmp_path)
    tensors = plain.aliased({"norm.weight": "a", "gone.weight": "t0.gone"})
    np.testing.assert_array_equal(tensors.f32("norm.weight", (2, 3)), plain.f32("a"))
    assert tensors.has("norm.weight")
    assert tensors.names() == plain.names()
    assert not tensors.has("gone.weight")
    assert not plain.has("norm.weight")
    with pytest.raises(BundleError, match=r"tensor t0\.gone missing from tensors\.bin"):
        tensors.f32("gone.weight")
    with pytest.raises(BundleError, match=r"tensor a has shape \[2, 3\], wanted \[4\]"):
        tensors.f32("norm.weight", (4,))
    assert tensors.aliased({"again": "norm.weight"}).has("a")
