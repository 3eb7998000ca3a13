"""What is asked of vectors: their length, and that they are finite."""

from __future__ import annotations

import numpy as np
import pytest

from npu_embed.errors import DeviceError, InputError, InputTypeError
from npu_embed.vectors import check_finite, checked_dim, cut, normalized


@pytest.mark.parametrize(("dim", "found"), [(None, 8), (1, 1), (8, 8), (np.int64(3), 3)])
def test_a_dim_is_from_one_to_the_whole(dim: object, found: int) -> None:
    assert checked_dim(dim, 8) == found


@pytest.mark.parametrize("dim", [0, -1, 9])
def test_a_dim_outside_is_refused(dim: int) -> None:
    with pytest.raises(InputError, match=f"dim={dim}: wanted 1 to 8"):
        checked_dim(dim, 8)


@pytest.mark.parametrize("dim", [True, np.True_, "4", 4.0])
def test_a_dim_that_is_no_integer_is_refused(dim: object) -> None:
    with pytest.raises(InputTypeError, match="wanted an integer from 1 to 8"):
        checked_dim(dim, 8)


def test_cut_vectors_are_of_unit_length_again_and_whole_ones_untouched() -> None:
    vectors = np.array([[3, 4, 12], [1, 0, 2]], dtype=np.float32)
    wanted = np.array([[0.6, 0.8], [1, 0]], dtype=np.float32)
    np.testing.assert_allclose(cut(vectors, 2), wanted, atol=1e-7)
    assert cut(vectors, 3) is vectors


def test_a_vector_without_a_direction_is_not_scaled_but_named() -> None:
    vectors = np.array([[3, 4, 12], [0, 0, 2]], dtype=np.float32)
    with pytest.raises(DeviceError, match=r"^texts\[1\]: its vector is not finite, or zero where"):
        cut(vectors, 2)
    with pytest.raises(DeviceError, match=r"^images\[1\]: "):
        cut(vectors, 2, "images")
    with pytest.raises(DeviceError, match=r"^texts\[0\]: "):
        normalized(vectors[1:] * 0)
    np.testing.assert_array_equal(normalized(vectors[1:]), [[0, 0, 1]])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_vector_that_is_not_finite_is_named(bad: float) -> None:
    vectors = np.ones((3, 2), dtype=np.float32)
    check_finite(vectors, [7, 9, 11])
    vectors[1, 1] = bad
    with pytest.raises(DeviceError, match=r"^texts\[9\]: its vector is not finite"):
        check_finite(vectors, [7, 9, 11])
    with pytest.raises(DeviceError, match=r"^images\[9\]: "):
        check_finite(vectors, [7, 9, 11], "images")
