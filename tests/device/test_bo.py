"""Buffers: two sides, ranges, parts, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from boards import Loaded, Xrt

SIZE = 8192


@pytest.fixture
def bo(xrt: Xrt, loaded: Loaded) -> Xrt:
    """A fresh data buffer."""
    return xrt.bo(loaded.device, SIZE, xrt.bo.host_only, loaded.kernel.group_id(3))


def test_a_buffer_has_its_size_and_an_address(bo: Xrt) -> None:
    assert bo.size() == SIZE
    assert bo.address() > 0
    assert bo.address() % 4096 == 0


def test_a_fresh_buffer_reads_zero(bo: Xrt) -> None:
    assert bytes(bo.map()) == bytes(SIZE)


@pytest.mark.parametrize(
    "content",
    [
        b"some bytes",
        bytearray(b"some bytes"),
        memoryview(b"some bytes"),
        np.arange(5, dtype=np.uint8),
        np.arange(6, dtype=np.uint16).reshape(2, 3),
        np.arange(6, dtype=np.float32),
        np.arange(6, dtype=np.dtype(">i2")),
        np.array(3, np.int64),
    ],
)
def test_write_takes_anything_that_lies_in_one_piece(bo: Xrt, content: bytes) -> None:
    bo.write(content, 100)
    wanted = memoryview(content).tobytes()
    assert bytes(bo.map()[100 : 100 + len(wanted)]) == wanted
    assert bytes(bo.map()[:100]) == bytes(100)
    assert bytes(bo.map()[100 + len(wanted) :]) == bytes(SIZE - 100 - len(wanted))


def test_write_of_nothing_changes_nothing(bo: Xrt) -> None:
    bo.write(b"", SIZE)
    assert bytes(bo.map()) == bytes(SIZE)


def test_read_gives_a_copy_as_int8(bo: Xrt) -> None:
    bo.write(b"\x01\xff\x03", 10)
    found = bo.read(3, 10)
    assert found.dtype == np.int8
    assert found.view(np.uint8).tobytes() == b"\x01\xff\x03"
    bo.write(b"\x05", 10)
    assert found[0] == 1


def test_map_is_the_hosts_side_itself(bo: Xrt) -> None:
    mapped = bo.map()
    assert (mapped.format, mapped.nbytes, mapped.readonly) == ("B", SIZE, False)
    mapped[5] = 9
    assert bo.read(1, 5)[0] == 9
    bo.write(b"\x07", 5)
    assert mapped[5] == 7


def test_a_part_shares_its_parents_memory(xrt: Xrt, bo: Xrt) -> None:
    part = xrt.bo(bo, 100, 64)
    assert part.size() == 100
    assert part.address() == bo.address() + 64
    part.write(b"abc", 1)
    assert bytes(bo.map()[65:68]) == b"abc"
    bo.write(b"xyz", 64)
    assert bytes(part.map()[:3]) == b"xyz"
    assert part.map().nbytes == 100


def test_a_part_may_begin_anywhere_and_outlives_its_parents_name(xrt: Xrt, bo: Xrt) -> None:
    part = xrt.bo(bo, 3, 7)
    del bo
    part.write(b"abc", 0)
    assert bytes(part.map()) == b"abc"


INVALID = "Invalid argument"


@pytest.mark.parametrize(
    ("seek", "size"), [(SIZE, 1), (SIZE - 1, 2), (0, SIZE + 1), (10 * SIZE, 0)]
)
def test_writing_or_reading_past_the_end_is_refused(bo: Xrt, seek: int, size: int) -> None:
    with pytest.raises(RuntimeError, match=f"attempting to write past buffer size: {INVALID}"):
        bo.write(bytes(size), seek)
    with pytest.raises(RuntimeError, match=f"attempting to read past buffer size: {INVALID}"):
        bo.read(size, seek)


@pytest.mark.parametrize(("size", "offset"), [(SIZE + 1, 0), (1, SIZE), (SIZE, 1), (SIZE, SIZE)])
def test_a_part_that_leaves_its_parent_is_refused(
    xrt: Xrt, bo: Xrt, size: int, offset: int
) -> None:
    with pytest.raises(RuntimeError, match=f"sub buffer size and offset: {INVALID}"):
        xrt.bo(bo, size, offset)


@pytest.mark.parametrize(("size", "offset"), [(101, 0), (1, 100), (100, 1)])
def test_a_sync_that_leaves_the_part_is_refused(
    xrt: Xrt, bo: Xrt, loaded: Loaded, size: int, offset: int
) -> None:
    part = xrt.bo(bo, 100, 64)
    says = f"Invalid offset and size when syncing sub buffer: {INVALID}"
    with pytest.raises(RuntimeError, match=says):
        part.sync(loaded.to_device, size, offset)


@pytest.mark.parametrize(("size", "offset"), [(SIZE + 1, 0), (1, SIZE), (SIZE, 1)])
def test_a_sync_that_leaves_the_buffer_is_refused(
    bo: Xrt, loaded: Loaded, size: int, offset: int
) -> None:
    says = rf"Invalid BO offset and size for sync'ing: {offset}, {size} \(err=22\): {INVALID}"
    with pytest.raises(RuntimeError, match=says):
        bo.sync(loaded.to_device, size, offset)


@pytest.mark.parametrize("arguments", [(), (0,), (1,), (None,), ("TO_DEVICE",)])
def test_a_direction_is_a_member_of_its_enumeration(bo: Xrt, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError):
        bo.sync(*arguments)


def test_a_sync_takes_all_or_a_size_and_an_offset(bo: Xrt, loaded: Loaded) -> None:
    bo.sync(loaded.to_device)
    bo.sync(loaded.to_device, 64, 128)
    with pytest.raises(TypeError):
        bo.sync(loaded.to_device, 64)


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("normal", r"unsupported buffer type: none flag \(err=95\): Operation not supported"),
        ("device_only", r"Bad BO type. \(err=22\): Invalid argument"),
        ("p2p", r"Bad BO type. \(err=22\): Invalid argument"),
        ("svm", r"Bad BO type. \(err=22\): Invalid argument"),
    ],
)
def test_only_host_only_and_cacheable_buffers_can_be_had(
    xrt: Xrt, loaded: Loaded, flag: str, says: str
) -> None:
    with pytest.raises(RuntimeError, match=says):
        xrt.bo(loaded.device, 4096, getattr(xrt.bo, flag), loaded.kernel.group_id(3))


def test_a_buffer_of_no_bytes_is_refused(xrt: Xrt, loaded: Loaded) -> None:
    with pytest.raises(RuntimeError, match=r"IOCTL failed \(err=-?22\): Invalid argument"):
        xrt.bo(loaded.device, 0, xrt.bo.host_only, loaded.kernel.group_id(3))


@pytest.mark.parametrize(
    "arguments",
    [
        lambda device, xrt: (),
        lambda device, xrt: (device,),
        lambda device, xrt: (device, 64),
        lambda device, xrt: (device, 64, 1 << 29, 0),  # an int is no flag
        lambda device, xrt: (device, -1, xrt.bo.host_only, 0),
        lambda device, xrt: (device, 64.0, xrt.bo.host_only, 0),
        lambda device, xrt: (device, "64", xrt.bo.host_only, 0),
        lambda device, xrt: (None, 64, xrt.bo.host_only, 0),
    ],
)
def test_other_constructors_do_not_exist(
    xrt: Xrt, device: Xrt, arguments: Callable[[Xrt, Xrt], tuple[Any, ...]]
) -> None:
    with pytest.raises(TypeError):
        xrt.bo(*arguments(device, xrt))


@pytest.mark.parametrize("arguments", [(), (b"x",), ([1, 2], 0), (b"x", None), (b"x", 0.0)])
def test_write_takes_a_buffer_and_an_offset(bo: Xrt, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError):
        bo.write(*arguments)


def test_read_takes_a_size_and_an_offset(bo: Xrt) -> None:
    with pytest.raises(TypeError):
        bo.read()
    with pytest.raises(TypeError):
        bo.read(4)


def test_addresses_of_living_buffers_never_overlap(xrt: Xrt, loaded: Loaded) -> None:
    group = loaded.kernel.group_id(3)
    sizes = [1, 4096, 4097, 65536, 3, 12288]
    for _ in range(3):
        bos = [xrt.bo(loaded.device, size, xrt.bo.host_only, group) for size in sizes]
        del bos[1::2]
        bos += [xrt.bo(loaded.device, size, xrt.bo.host_only, group) for size in sizes]
        spans = sorted((bo.address(), bo.address() + bo.size()) for bo in bos)
        for (_, end), (start, _) in pairwise(spans):
            assert end <= start
