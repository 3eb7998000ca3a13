import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from npu_embed.errors import BundleError
from npu_embed.tensors import Tensors, open_safetensors, open_tensors, write_safetensors


def packed(header: object, data: bytes = b"") -> bytes:
    """A safetensors file of this header (text as it is, anything else as JSON) and data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def opened(folder: Path, content: bytes) -> Tensors:
    (folder / "tensors.safetensors").write_bytes(content)
    return open_tensors(folder)


GOOD = packed(
    {
        "__metadata__": {"format": "np"},
        "w": entry("F32", [2, 3], 0, 24),
        "b": entry("BF16", [2], 24, 28),
        "p": entry("U8", [4], 28, 32),
        "none": entry("F32", [0, 3], 32, 32),
        "one": entry("I32", [], 32, 36),
        "half": entry("F16", [2], 36, 40),
        "big": entry("I64", [1], 40, 48),
    },
    np.arange(6, dtype="<f4").tobytes()
    + bytes([0x80, 0x3F, 0x00, 0x40])
    + b"\x01\x02\x03\x04"
    + (7).to_bytes(4, "little")
    + np.array([1.5, -2], "<f2").tobytes()
    + (-5).to_bytes(8, "little", signed=True),
)


def test_hand_made_bytes_are_read_by_dtype_and_shape(tmp_path: Path) -> None:
    tensors = opened(tmp_path, GOOD)
    assert tensors.names() == ("w", "b", "p", "none", "one", "half", "big")
    np.testing.assert_array_equal(tensors.f32("w"), [[0, 1, 2], [3, 4, 5]])
    assert tensors.bf16("b").tolist() == [0x3F80, 0x4000]
    assert tensors.u8("p").tolist() == [1, 2, 3, 4]
    assert tensors.f32("none").shape == (0, 3)
    assert tensors.i32("one").shape == ()
    assert tensors.i32("one")[()] == 7
    assert tensors.f16("half").tolist() == [1.5, -2]
    assert tensors.i64("big").tolist() == [-5]
    assert bytes(tensors.raw("b")) == bytes([0x80, 0x3F, 0x00, 0x40])
    assert (tensors.dtype("b"), tensors.shape("w"), tensors.file) == (
        "bf16",
        (2, 3),
        "tensors.safetensors",
    )
    assert tensors.has("w")
    assert not tensors.has("__metadata__")


def test_tensors_that_are_not_aligned_are_read(tmp_path: Path) -> None:
    header = {"x": entry("U8", [1], 0, 1), "y": entry("F32", [1], 1, 5)}
    content = packed(header, b"\x09" + np.float32(2.5).tobytes())
    assert opened(tmp_path, content).f32("y").tolist() == [2.5]


def test_files_of_the_safetensors_package_are_read(tmp_path: Path) -> None:
    wanted: dict[str, npt.NDArray[Any]] = {
        "f": np.linspace(0, 1, 35, dtype=np.float32).reshape(5, 7),
        "i": np.arange(3, dtype=np.int32),
        "l": np.arange(3, dtype=np.int64),
        "u": np.arange(9, dtype=np.uint8),
        "h": np.ones((2, 2), np.float16),
    }
    save_file(wanted, tmp_path / "tensors.safetensors", metadata={"format": "np"})
    tensors = open_tensors(tmp_path)
    assert sorted(tensors.names()) == sorted(wanted)
    np.testing.assert_array_equal(tensors.f32("f"), wanted["f"])
    np.testing.assert_array_equal(tensors.i32("i"), wanted["i"])
    np.testing.assert_array_equal(tensors.i64("l"), wanted["l"])
    np.testing.assert_array_equal(tensors.u8("u"), wanted["u"])
    np.testing.assert_array_equal(tensors.f16("h"), wanted["h"])


def test_what_is_written_is_read_by_the_safetensors_package_and_by_us(tmp_path: Path) -> None:
    arrays: dict[str, npt.NDArray[Any]] = {
        "packed": np.arange(5, dtype=np.uint8),
        "weight": np.arange(12, dtype=np.float32).reshape(3, 4).T,
        "half": np.ones(3, np.float16),
        "scalar": np.array(3, np.int32),
        "none": np.zeros((0, 2), np.int64),
    }
    path = tmp_path / "tensors.safetensors"
    write_safetensors(path, arrays)
    theirs, ours = load_file(path), open_tensors(tmp_path)
    assert sorted(theirs) == sorted(ours.names()) == sorted(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(theirs[name], array)
        assert theirs[name].shape == ours.shape(name) == array.shape
    np.testing.assert_array_equal(ours.f32("weight"), arrays["weight"])
    np.testing.assert_array_equal(ours.u8("packed"), arrays["packed"])


def test_bfloat16_bits_are_written_as_such(tmp_path: Path) -> None:
    path = tmp_path / "tensors.safetensors"
    bits = np.array([[0x3F80, 0x4000]], np.uint16)
    write_safetensors(path, {"embed": bits}, bf16={"embed"})
    with safe_open(path, framework="np") as file:
        assert file.get_slice("embed").get_dtype() == "BF16"
    np.testing.assert_array_equal(open_tensors(tmp_path).bf16("embed"), bits)


def test_the_order_of_the_arrays_does_not_change_the_file(tmp_path: Path) -> None:
    arrays = {name: np.full(3, i, np.float32) for i, name in enumerate("cab")}
    write_safetensors(tmp_path / "a", arrays)
    write_safetensors(tmp_path / "b", dict(sorted(arrays.items())))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_data_begins_at_a_multiple_of_64_and_each_tensor_at_one_of_its_items(
    tmp_path: Path,
) -> None:
    arrays: dict[str, npt.NDArray[Any]] = {
        "a": np.zeros(3, np.uint8),
        "b": np.zeros(3, np.float16),
        "c": np.zeros(1, np.float32),
    }
    write_safetensors(tmp_path / "tensors.safetensors", arrays)
    tensors = open_tensors(tmp_path)
    assert tensors.f32("c").flags.aligned
    assert tensors.f16("b").flags.aligned
    assert int.from_bytes((tmp_path / "tensors.safetensors").read_bytes()[:8], "little") % 64 == 56


@pytest.mark.parametrize(
    ("name", "array", "bf16"),
    [
        ("x", np.zeros(2), ()),
        ("x", np.zeros(2, np.uint16), ()),
        ("x", np.zeros(2, np.float32), ("x",)),
        ("x", np.zeros(2, ">f4"), ()),
        ("__metadata__", np.zeros(2, np.float32), ()),
    ],
)
def test_an_array_no_bundle_holds_is_not_written(
    tmp_path: Path, name: str, array: npt.NDArray[Any], bf16: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError, match=f"tensor {name}: {array.dtype}.*wanted float32"):
        write_safetensors(tmp_path / "x", {name: array}, bf16=bf16)
    assert not (tmp_path / "x").exists()


def test_views_are_read_only_and_copy_nothing(tmp_path: Path) -> None:
    tensors = opened(tmp_path, GOOD)
    view = tensors.f32("w")
    assert not view.flags.writeable
    assert np.shares_memory(view, tensors.raw("w"))
    with pytest.raises(ValueError, match="read-only"):
        view[0, 0] = 1


def test_a_view_outlives_close_and_nothing_is_read_after_it(tmp_path: Path) -> None:
    tensors = opened(tmp_path, GOOD)
    view = tensors.f32("w")
    tensors.close()
    tensors.close()
    assert view[1, 2] == 5
    with pytest.raises(ValueError, match=r"tensors\.safetensors: closed, wanted it open"):
        tensors.raw("w")


def test_a_missing_tensor_is_named_with_its_file(tmp_path: Path) -> None:
    tensors = opened(tmp_path, GOOD)
    for read in (tensors.f32, tensors.raw, tensors.dtype, tensors.shape):
        with pytest.raises(BundleError) as info:
            read("gate")
        assert str(info.value) == (
            "tensor gate missing from tensors.safetensors; re-export the bundle."
        )


@pytest.mark.parametrize("read", ["f32", "f16", "u8", "i32", "i64"])
def test_a_read_as_another_dtype_names_both(tmp_path: Path, read: str) -> None:
    tensors = opened(tmp_path, GOOD)
    with pytest.raises(BundleError, match=rf"safetensors: tensor b is bf16, wanted {read}; re-"):
        getattr(tensors, read)("b")
    with pytest.raises(BundleError, match="tensor w is f32, wanted bf16"):
        tensors.bf16("w")


@pytest.mark.parametrize("shape", [(2, 3), (None, 3), (2, None), (None, None)])
def test_a_shape_that_fits_is_accepted(tmp_path: Path, shape: tuple[int | None, ...]) -> None:
    assert opened(tmp_path, GOOD).f32("w", shape).shape == (2, 3)


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [((3, 2), "[3, 2]"), ((6,), "[6]"), ((None,), "[any]"), ((2, 3, 1), "[2, 3, 1]"), ((), "[]")],
)
def test_another_shape_is_refused_with_both(
    tmp_path: Path, shape: tuple[int | None, ...], wanted: str
) -> None:
    with pytest.raises(BundleError) as info:
        opened(tmp_path, GOOD).f32("w", shape)
    assert str(info.value) == (
        f"tensors.safetensors: tensor w has shape [2, 3], wanted {wanted}; re-export the bundle."
    )


@pytest.mark.parametrize("size", [0, 7, 8, 100, len(GOOD) - 49, len(GOOD) - 48, len(GOOD) - 1])
def test_a_truncated_file_says_what_it_should_hold(tmp_path: Path, size: int) -> None:
    wanted = "at least 8" if size < 8 else f"at least {len(GOOD) - 48}"
    wanted = wanted if size < len(GOOD) - 48 else str(len(GOOD))
    with pytest.raises(BundleError) as info:
        opened(tmp_path, GOOD[:size])
    assert str(info.value) == (
        f"file tensors.safetensors: expected {wanted} bytes, found {size}; copy it again."
    )


F32_PAIR = b'"dtype":"F32","shape":[1],"data_offsets":[0,4]'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (bytes(8), "a header of 0 bytes, wanted 2 to 16777216"),
        ((1 << 63).to_bytes(8, "little"), "a header of 9223372036854775808 bytes, wanted 2 to"),
        (b"\xff" * 64, "a header of 18446744073709551615 bytes, wanted"),
        ((100_000_001).to_bytes(8, "little"), "a header of 100000001 bytes, wanted"),
        (packed(b"{]"), "the header is not JSON"),
        (packed(b'{"a":\xff}'), "the header is not JSON"),
        (packed(b"[" * 200_000), "the header is not JSON"),
        (packed('{"a":1}'.encode("utf-16")), "the header is not JSON"),
        (packed(b'{"a":' + b"9" * 5000 + b"}"), "the header is not JSON"),
        (packed([1]), "the header is no JSON object"),
        (packed(b"  "), "the header is not JSON"),
        (packed({"__metadata__": 3}), "__metadata__ is no JSON object"),
        (packed(b'{"w":{%b},"w":{%b}}' % (F32_PAIR, F32_PAIR), bytes(4)), "'w' twice in the head"),
        (packed(b'{"w":{"dtype":"U8",%b}}' % F32_PAIR, bytes(4)), "'dtype' twice in the header"),
        (packed({"w": 3}), "tensor 'w': wanted dtype, shape and data_offsets"),
        (packed({"w": {"dtype": "F32"}}), "tensor 'w': wanted dtype, shape and data_offsets"),
        (packed({"w": entry("F31", [1], 0, 4)}, bytes(4)), "tensor 'w' is 'F31', wanted"),
        (packed({"w": entry("F32", [-1], 0, 4)}, bytes(4)), "tensor 'w': shape is '[-1]', wanted"),
        (packed({"w": entry("F32", [-1, -1], 0, 4)}, bytes(4)), "tensor 'w': shape is '[-1, -1]'"),
        (packed({"w": entry("F32", [1], -4, 0)}, bytes(4)), "tensor 'w': data_offsets is '[-4, 0"),
        (packed({"w": entry("U8", [True], 0, 1)}, bytes(1)), "tensor 'w': shape is '[True]'"),
        (packed({"w": entry("U8", [1.0], 0, 1)}, bytes(1)), "tensor 'w': shape is '[1.0]'"),  # type: ignore[list-item]
        (packed({"w": entry("U8", "1", 0, 1)}, bytes(1)), "tensor 'w': shape is '1'"),  # type: ignore[arg-type]
        (packed({"w": entry("U8", [2**63], 0, 1)}, bytes(1)), "tensor 'w': shape is"),
        (packed({"w": entry("U8", [2**62] * 8, 0, 1)}, bytes(1)), "tensor 'w': offsets 0 to 1"),
        (packed({"w": entry("U8", [1] * 9, 0, 1)}, bytes(1)), "tensor 'w': 9 dimensions and 2"),
        (
            packed({"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 2]}}, bytes(2)),
            "tensor 'w': 1 dimensions and 3 offsets",
        ),
        (
            packed({"w": entry("F32", [2], 0, 4)}, bytes(4)),
            "tensor 'w': offsets 0 to 4, wanted 8 bytes for f32 [2]",
        ),
        (
            packed({"w": entry("U8", [2], 0, 4)}, bytes(4)),
            "tensor 'w': offsets 0 to 4, wanted 2 bytes for u8 [2]",
        ),
        (
            packed({"w": entry("F32", [1], 4, 0)}, bytes(4)),
            "tensor 'w': offsets 4 to 0, wanted 4 bytes",
        ),
        (
            packed({"v": entry("U8", [4], 0, 4), "w": entry("U8", [4], 2, 6)}, bytes(6)),
            "overlaps tensor 'v', which ends",
        ),
        (
            packed({"v": entry("U8", [4], 0, 4), "w": entry("U8", [4], 0, 4)}, bytes(4)),
            "overlaps tensor 'v', which ends",
        ),
        (
            packed({"v": entry("U8", [4], 0, 4), "w": entry("U8", [4], 5, 9)}, bytes(9)),
            "leaves a gap after tensor 'v', which ends",
        ),
        (packed({"w": entry("U8", [4], 1, 5)}, bytes(5)), "leaves a gap after the header"),
        (packed({"w": entry("U8", [4], 0, 4)}, bytes(7)), "3 of them after the last tensor"),
    ],
)
def test_a_damaged_file_is_refused_with_the_tensor_at_fault(
    tmp_path: Path, content: bytes, message: str
) -> None:
    with pytest.raises(BundleError) as info:
        opened(tmp_path, content)
    assert message in str(info.value)
    assert "tensors.safetensors" in str(info.value)
    assert len(str(info.value)) < 500


def test_more_values_than_any_header_has_are_refused_before_they_are_read(tmp_path: Path) -> None:
    content = packed(b"[" + b"[]," * 2_000_000 + b"0]")
    (tmp_path / "tensors.safetensors").write_bytes(content)
    wanted = (
        "tensors.safetensors: the header: 4000002 JSON values, wanted at most 4000000; re-export"
    )
    with pytest.raises(BundleError, match=wanted):
        open_tensors(tmp_path)


@settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), max_size=6))
def test_a_file_with_changed_bytes_is_read_or_a_bundle_error(
    tmp_path: Path, changes: list[tuple[int, int]]
) -> None:
    content = bytearray(GOOD)
    for at, value in changes:
        content[at] = value
    try:
        tensors = opened(tmp_path, bytes(content))
    except BundleError:
        return
    for name in tensors.names():
        assert math.prod(tensors.shape(name)) <= tensors.raw(name).size


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)
ODD = st.sampled_from(["dtype", "shape", "data_offsets"])


@settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(st.sampled_from(["w", "__metadata__"]), JSON), ODD, JSON)
def test_any_header_is_read_or_a_bundle_error(
    tmp_path: Path, header: dict[str, object], key: str, value: object
) -> None:
    header["v"] = {**entry("U8", [4], 0, 4), key: value}
    try:
        opened(tmp_path, packed(header, bytes(4)))
    except BundleError:
        pass


TXT = """\
# name dtype shape offset bytes
t.norm f32 2,3 64 24

t.embed bf16 2 0 4
t.packed u8 4,4 128 9
t.ids i32 1 192 4
"""
BIN = (
    bytes([0x80, 0x3F, 0x00, 0x40]).ljust(64, b"\0")
    + np.arange(6, dtype="<f4").tobytes().ljust(64, b"\0")
    + b"123456789".ljust(64, b"\0")
    + (7).to_bytes(4, "little")
)


def published(folder: Path, table: str = TXT, data: bytes = BIN) -> Tensors:
    (folder / "tensors.txt").write_text(table)
    (folder / "tensors.bin").write_bytes(data)
    return open_tensors(folder)


def test_the_published_format_is_read_through_the_same_interface(tmp_path: Path) -> None:
    tensors = published(tmp_path)
    assert tensors.names() == ("t.norm", "t.embed", "t.packed", "t.ids")
    np.testing.assert_array_equal(tensors.f32("t.norm", (2, 3)), [[0, 1, 2], [3, 4, 5]])
    assert tensors.bf16("t.embed").tolist() == [0x3F80, 0x4000]
    assert tensors.i32("t.ids").tolist() == [7]
    assert not tensors.f32("t.norm").flags.writeable
    with pytest.raises(BundleError, match=r"tensor x missing from tensors\.bin; re-export"):
        tensors.f32("x")


def test_packed_bytes_need_not_fit_their_shape_until_they_are_read_by_type(tmp_path: Path) -> None:
    tensors = published(tmp_path)
    assert bytes(tensors.raw("t.packed")) == b"123456789"
    with pytest.raises(BundleError, match=r"tensor t\.packed: 9 bytes, wanted 16 for u8 \[4, 4\]"):
        tensors.u8("t.packed")


def test_an_empty_published_bundle_has_no_tensors(tmp_path: Path) -> None:
    assert published(tmp_path, "", b"").names() == ()


def test_bytes_after_the_last_published_tensor_are_padding(tmp_path: Path) -> None:
    assert published(tmp_path, data=BIN + bytes(60)).has("t.ids")


@pytest.mark.parametrize("size", [0, 7, 8, 195])
def test_truncated_published_tensors_say_what_they_should_hold(tmp_path: Path, size: int) -> None:
    message = f"file tensors.bin: expected at least 196 bytes, found {size}; copy it again."
    with pytest.raises(BundleError) as info:
        published(tmp_path, data=BIN[:size])
    assert str(info.value) == message


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("x f32 1 0", "tensors.txt:2: 4 fields, wanted NAME DTYPE SHAPE OFFSET BYTES"),
        ("x f32 1 0 4 5", "tensors.txt:2: 6 fields, wanted NAME DTYPE SHAPE OFFSET BYTES"),
        ("x f16 1 0 2", "tensors.txt:2: tensor x is 'f16', wanted f32, bf16, u8, i32"),
        ("x f32 - 0 4", "tensors.txt:2: tensor x shape is '-', wanted an integer"),
        ("x f32 1, 0 4", "tensors.txt:2: tensor x shape is '', wanted an integer"),
        ("x f32 -1 0 4", "tensors.txt:2: tensor x shape is '-1', wanted an integer"),
        ("x f32 1 -8 4", "tensors.txt:2: x OFFSET is '-8', wanted an integer"),
        ("x f32 1 0 -4", "tensors.txt:2: x BYTES is '-4', wanted an integer"),
        ("x f32 1 4 4", "tensors.txt:2: tensor x: 1 dimensions at byte 4, 4 bytes, wanted"),
        ("x f32 1 0 5", "tensors.txt:2: tensor x: 1 dimensions at byte 0, 5 bytes, wanted"),
        ("x u8 " + ",".join("1" * 9) + " 0 1", "tensors.txt:2: tensor x: 9 dimensions"),
        ("x u8 1 0 1\nx u8 1 8 1", "tensors.txt:3: tensor x for the second time, wanted it once"),
        ("x u8 16 0 16\ny u8 9 8 9", "tensors.txt: tensor 'y' at byte 8 overlaps tensor 'x', wh"),
        (
            "x u8 1 9223372036854775800 9223372036854775807",
            "file tensors.bin: expected at least 18446744073709551607 bytes, found 196",
        ),
    ],
)
def test_a_wrong_published_table_is_refused_with_its_line(
    tmp_path: Path, line: str, message: str
) -> None:
    with pytest.raises(BundleError) as info:
        published(tmp_path, f"# table\n{line}\n")
    assert str(info.value).startswith(message)


def test_a_folder_with_no_tensors_or_both_kinds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"'tensors\.safetensors': no such file"):
        open_tensors(tmp_path)
    (tmp_path / "tensors.txt").write_text("")
    with pytest.raises(BundleError, match=r"'tensors\.bin': no such file"):
        open_tensors(tmp_path)
    (tmp_path / "tensors.safetensors").write_bytes(GOOD)
    with pytest.raises(BundleError, match=r"tensors\.safetensors and tensors\.txt, wanted one"):
        open_tensors(tmp_path)


def test_only_regular_files_of_the_bundle_are_opened(tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    folder.mkdir()
    (tmp_path / "outside").write_bytes(GOOD)
    (folder / "tensors.safetensors").symlink_to("../outside")
    with pytest.raises(BundleError, match="a link that leads out of the bundle"):
        open_tensors(folder)
    (folder / "tensors.safetensors").unlink()
    os.mkfifo(folder / "tensors.safetensors")
    with pytest.raises(BundleError, match="not a regular file"):
        open_tensors(folder)


def test_a_file_that_cannot_be_opened_is_a_bundle_error(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="absent: No such file or directory, wanted a file"):
        open_safetensors(tmp_path / "absent")
