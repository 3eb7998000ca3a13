"""Row buffers on the emulated NPU, in strict memory: what is not synced is not there."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from npu_embed.bf16 import round_f32, to_f32
from npu_embed.device import Session
from npu_embed.emulator.memory import Memory
from npu_embed.rows import PAGE_BYTES, Rows

F32 = NDArray[np.float32]


@pytest.fixture
def session() -> Session:
    return Session.open("emulated")


def device_side(rows: Rows) -> F32:
    """What the device sees: [rows + 1, width]."""
    memory: Memory = rows.view(0, 0, 1).bo._window.memory
    wanted = (rows.rows + 1) * rows.width * 2
    return to_f32(memory.device[:wanted].view(np.uint16).reshape(rows.rows + 1, rows.width))


def numbers(rows: int, width: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)


def test_rows_are_zero_on_both_sides_when_made(session: Session) -> None:
    rows = Rows(session, 5, 8)
    assert not device_side(rows).any()
    assert not rows.get(5).any()


def test_put_rounds_to_the_nearest_bf16_and_the_device_sees_it(session: Session) -> None:
    rows = Rows(session, 5, 8)
    x = numbers(3, 8)
    rows.put(x)
    np.testing.assert_array_equal(device_side(rows)[:3], round_f32(x))
    np.testing.assert_array_equal(rows.get(3), round_f32(x))


def test_put_at_a_place_leaves_the_rest(session: Session) -> None:
    rows = Rows(session, 6, 8)
    rows.put(numbers(6, 8))
    wanted = round_f32(numbers(6, 8))
    x = numbers(2, 4, seed=1)
    rows.put(x, row=3, col=2)
    wanted[3:5, 2:6] = round_f32(x)
    np.testing.assert_array_equal(device_side(rows)[:6], wanted)
    np.testing.assert_array_equal(rows.get(6), wanted)


def test_put_and_get_sync_the_rows_used_and_no_more(session: Session) -> None:
    rows = Rows(session, 64, 32)
    before = session.counters.copy()
    rows.put(numbers(3, 32), row=4)
    rows.get(2, row=10)
    done = session.counters.since(before)
    assert (done.syncs, done.bytes_to_device, done.bytes_from_device) == (2, 3 * 64, 2 * 64)


def test_get_sees_what_the_device_wrote_and_not_what_the_host_still_holds(
    session: Session,
) -> None:
    rows = Rows(session, 4, 32)
    rows.put(numbers(4, 32))
    memory: Memory = rows.view(0, 0, 1).bo._window.memory
    memory.device[64:128] = 0
    found = rows.get(4)
    assert not found[1].any()
    assert found[[0, 2, 3]].any(axis=1).all()


def test_get_returns_the_first_columns_of_some_rows_as_a_copy(session: Session) -> None:
    rows = Rows(session, 6, 8)
    x = numbers(6, 8)
    rows.put(x)
    found = rows.get(2, 3, row=4)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, round_f32(x)[4:6, :3])
    found[:] = 0
    np.testing.assert_array_equal(rows.get(6), round_f32(x))


def test_a_view_at_a_column_as_long_as_the_rows_fits_by_the_extra_row(session: Session) -> None:
    rows = Rows(session, 4, 8)
    view = rows.view(0, 6, 4 * 8)
    assert (view.offset, view.size) == (12, 64)
    assert rows.view(0, 6, 4 * 8) is view


def test_row_buffers_are_whole_pages(session: Session) -> None:
    rows = Rows(session, 5, 10)
    assert rows.view(0, 0, PAGE_BYTES // 2).size == PAGE_BYTES
    with pytest.raises(ValueError, match=r"buffer of 4096 bytes"):
        rows.view(0, 0, PAGE_BYTES // 2 + 1)


@pytest.mark.parametrize(
    ("shape", "row", "col"),
    [
        ((5, 8), 0, 0),
        ((1, 9), 0, 0),
        ((1, 8), 4, 0),
        ((1, 8), -1, 0),
        ((1, 2), 0, 7),
        ((1, 1), 0, -1),
    ],
)
def test_put_outside_the_rows_is_refused(
    session: Session, shape: tuple[int, int], row: int, col: int
) -> None:
    rows = Rows(session, 4, 8)
    with pytest.raises(ValueError, match=r"leaves rows \[4, 8\]"):
        rows.put(np.ones(shape, np.float32), row=row, col=col)
    assert not device_side(rows).any()


@pytest.mark.parametrize(
    ("rows", "cols", "row"), [(5, 8, 0), (1, 9, 0), (1, 8, 4), (1, 8, -1), (-1, 8, 0), (1, -1, 0)]
)
def test_get_outside_the_rows_is_refused(session: Session, rows: int, cols: int, row: int) -> None:
    with pytest.raises(ValueError, match=r"leaves rows \[4, 8\]"):
        Rows(session, 4, 8).get(rows, cols, row=row)
