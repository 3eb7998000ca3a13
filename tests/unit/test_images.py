"""Images to patches: what transformers' image processor made of them, and what is no image."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gemma_checkpoints import TINY_EG2
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import load_file

from npu_embed.errors import InputError, InputTypeError
from npu_embed.images import ImageLimits, cut, iter_images, one_image, preprocess, target_size

TINY = ImageLimits(patch_size=16, pooling_kernel_size=3, max_soft_tokens=70)
FULL = ImageLimits(patch_size=16, pooling_kernel_size=3, max_soft_tokens=280)
BLOCK = 48
UNSIZED = (480, 336)  # fills TINY's budget: not resized

# Two resizers may round a value differently, seldom.
PIXEL_STEP = 1 / 255
MAX_SHARE = 1e-3

U8 = np.typing.NDArray[np.uint8]


def noise(height: int, width: int, seed: int = 0) -> U8:
    """An image without any order."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


# --- against transformers ------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(3))
def test_patches_are_those_of_hugging_faces_processor(index: int) -> None:
    stored = load_file(TINY_EG2 / "references.safetensors")
    patches = preprocess(stored[f"image.{index}.rgb"], TINY)
    wanted = stored[f"image.{index}.pixels"]
    np.testing.assert_array_equal(patches.positions, stored[f"image.{index}.positions"])
    assert patches.pixels.shape == wanted.shape
    assert patches.pixels.dtype == np.float32
    error = np.abs(patches.pixels - wanted)
    assert error.max() <= PIXEL_STEP * 1.001
    assert (error > 0).mean() <= MAX_SHARE
    assert patches.rows * patches.columns == len(patches) == len(wanted)


@pytest.mark.parametrize(
    ("size", "wanted"),
    [
        ((1, 1), (768, 768)),
        ((480, 640), (672, 912)),
        ((640, 480), (912, 672)),
        ((1080, 1920), (576, 1056)),
        ((672, 960), (672, 960)),
        ((1, 5000), (48, 13440)),
        ((5000, 1), (13440, 48)),
        ((3, 1000), (48, 13440)),
    ],
)
def test_sizes_are_those_of_hugging_faces_processor(
    size: tuple[int, int], wanted: tuple[int, int]
) -> None:
    assert target_size(*size, FULL) == wanted


@given(st.integers(1, 20_000), st.integers(1, 20_000), st.integers(1, 1120))
def test_any_size_becomes_whole_blocks_within_the_budget(
    height: int, width: int, most: int
) -> None:
    limits = ImageLimits(patch_size=16, pooling_kernel_size=3, max_soft_tokens=most)
    rows, columns = (side / BLOCK for side in target_size(height, width, limits))
    assert rows == int(rows) >= 1
    assert columns == int(columns) >= 1
    assert rows * columns <= most


# --- patches -------------------------------------------------------------------------------------


def test_a_patch_is_its_pixels_row_by_row() -> None:
    image = noise(32, 48)
    patches = cut(image, 16)
    assert (patches.rows, patches.columns) == (2, 3)
    np.testing.assert_array_equal(patches.positions[[0, 2, 3, 5]], [[0, 0], [2, 0], [0, 1], [2, 1]])
    for (x, y), values in zip(patches.positions, patches.values, strict=True):
        corner = image[16 * y : 16 * y + 16, 16 * x : 16 * x + 16]
        np.testing.assert_array_equal(values.reshape(16, 16, 3), corner)
    np.testing.assert_array_equal(patches.pixels, patches.values / np.float32(255))


def test_an_image_of_the_right_size_stays_as_it_is() -> None:
    image = noise(*UNSIZED)
    np.testing.assert_array_equal(preprocess(image, TINY).values, cut(image, 16).values)


@pytest.mark.parametrize("view", ["transposed", "read-only", "every other"])
def test_any_view_of_an_array_will_do(view: str) -> None:
    image = noise(60, 40)
    shown: dict[str, U8] = {
        "transposed": np.ascontiguousarray(image.transpose(1, 0, 2)).transpose(1, 0, 2),
        "read-only": image.copy(),
        "every other": np.repeat(image, 2, axis=0)[::2],
    }
    shown["read-only"].flags.writeable = False
    found = preprocess(shown[view], TINY).values
    np.testing.assert_array_equal(found, preprocess(image, TINY).values)


# --- kinds of images -----------------------------------------------------------------------------


def test_a_file_an_image_in_memory_and_an_array_are_the_same(tmp_path: Path) -> None:
    array = noise(50, 70)
    image = Image.fromarray(array)
    path = tmp_path / "noise.png"
    image.save(path)
    wanted = preprocess(array, TINY).values
    for other in (image, path, str(path), path.relative_to(tmp_path)):
        if isinstance(other, Path) and not other.is_absolute():
            continue
        np.testing.assert_array_equal(preprocess(other, TINY).values, wanted)


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "CMYK", "1", "I;16"])
def test_other_colours_become_rgb_as_pillow_has_it(mode: str, tmp_path: Path) -> None:
    array = noise(48, 48)
    if mode == "I;16":
        image = Image.fromarray(array[:, :, 0].astype(np.uint16) * 257)
    else:
        image = Image.fromarray(array).convert(mode)
    path = tmp_path / ("a.tiff" if mode == "CMYK" else "a.png")
    image.save(path)
    wanted = preprocess(np.asarray(image.convert("RGB")), TINY).values
    np.testing.assert_array_equal(preprocess(image, TINY).values, wanted)
    np.testing.assert_array_equal(preprocess(path, TINY).values, wanted)


def test_alpha_is_dropped() -> None:
    array = noise(48, 48)
    alpha = np.zeros((48, 48, 1), dtype=np.uint8)
    image = Image.fromarray(np.concatenate([array, alpha], axis=2))
    np.testing.assert_array_equal(preprocess(image, TINY).values, preprocess(array, TINY).values)


def test_a_file_is_turned_upright_and_an_image_in_memory_is_not(tmp_path: Path) -> None:
    array = noise(40, 80)
    image = Image.fromarray(array)
    exif = image.getexif()
    exif[0x0112] = 6  # orientation: turn by 90 degrees, clockwise
    path = tmp_path / "turned.png"
    image.save(path, exif=exif)
    upright = np.ascontiguousarray(np.rot90(array, -1))
    np.testing.assert_array_equal(preprocess(path, TINY).values, preprocess(upright, TINY).values)
    with Image.open(path) as opened:
        np.testing.assert_array_equal(
            preprocess(opened, TINY).values, preprocess(array, TINY).values
        )


def test_of_an_animation_it_is_the_first_frame(tmp_path: Path) -> None:
    frames = [Image.fromarray(noise(48, 48, seed)).convert("P") for seed in (1, 2)]
    path = tmp_path / "a.gif"
    frames[0].save(path, save_all=True, append_images=frames[1:])
    wanted = preprocess(np.asarray(frames[0].convert("RGB")), TINY).values
    np.testing.assert_array_equal(preprocess(path, TINY).values, wanted)


def test_without_pillow_only_a_resize_and_a_file_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "a.png"
    Image.fromarray(noise(10, 10)).save(path)
    for name in [name for name in sys.modules if name.split(".")[0] == "PIL"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert len(preprocess(noise(*UNSIZED), TINY)) == 21 * 30
    words = r"images\[3\]: Pillow is not installed, .*pip install 'npu-embed\[images\]'"
    for image in (noise(10, 10), path):
        with pytest.raises(InputError, match=words):
            preprocess(image, TINY, "images[3]")


# --- what is no image ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("image", "error", "words"),
    [
        (None, InputTypeError, "images.2.: NoneType, wanted a PIL image, a path or a uint8 array"),
        (3, InputTypeError, "int, wanted a PIL image"),
        (b"\x89PNG", InputTypeError, "bytes, wanted a PIL image"),
        ([noise(4, 4)], InputTypeError, "list, wanted a PIL image"),
        (np.zeros((4, 4, 3), np.float32), InputTypeError, "float32 array, wanted uint8 from 0 to"),
        (np.zeros((4, 4, 3), np.int64), InputTypeError, "int64 array, wanted uint8"),
        (np.zeros((4, 4), np.uint8), InputError, r"array 4x4, wanted \[height, width, 3\]"),
        (np.zeros((4, 4, 4), np.uint8), InputError, r"array 4x4x4, wanted \[height, width, 3\]"),
        (np.zeros((3, 4, 4), np.uint8), InputError, r"array 3x4x4, wanted \[height, width, 3\]"),
        (np.zeros((1, 4, 4, 3), np.uint8), InputError, r"array 1x4x4x3, wanted \[height"),
        (np.zeros((0, 4, 3), np.uint8), InputError, "array 0x4x3, wanted at least one pixel"),
        (np.zeros((4, 0, 3), np.uint8), InputError, "array 4x0x3, wanted at least one pixel"),
        (Image.new("RGB", (0, 7)), InputError, "0 x 7 pixels, wanted at least one pixel"),
        ("", InputError, "images.2.: '': no such file, wanted an image file"),
        ("a\0b", InputError, "wanted an image file"),
        ("/nowhere/a.png", InputError, "'/nowhere/a.png': no such file, wanted an image file"),
        ("/", InputError, "'/': no such file"),
    ],
)
def test_what_is_no_image_is_refused(image: Any, error: type[Exception], words: str) -> None:  # noqa: ANN401
    with pytest.raises(error, match=words):
        preprocess(image, TINY, "images[2]")


def png() -> bytes:
    """A file of an image."""
    file = BytesIO()
    Image.fromarray(noise(64, 64)).save(file, "png")
    return file.getvalue()


@pytest.mark.parametrize(
    "content",
    [b"", b"\x89PNG", b"hello, world\n" * 100, png()[:200], png()[:-5000], b"GIF89a\0\0\0\0"],
    ids=["empty", "magic", "text", "header", "cut", "no pixels"],
)
def test_a_damaged_file_is_refused_by_its_name(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"^images\[0\]: "):
        preprocess(path, TINY, "images[0]")


def test_a_fifo_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(InputError, match="no such file"):
        preprocess(fifo, TINY)


def test_an_image_of_too_many_pixels_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "bomb.png"
    Image.fromarray(noise(64, 64)).save(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(InputError, match=r"bomb\.png.*could be decompression bomb"):
        preprocess(path, TINY)


# --- one and several -----------------------------------------------------------------------------


def test_one_image_is_told_from_several() -> None:
    one: list[Any] = ["a.png", Path("a.png"), noise(4, 4), noise(4, 4)[0], Image.new("RGB", (1, 1))]
    for image in one:
        assert one_image(image) is image
    several: list[Any] = [[], ["a.png"], (), noise(4, 4)[None], iter(["a.png"])]
    for images in several:
        assert one_image(images) is None


@pytest.mark.parametrize("make", [list, tuple, iter, lambda images: (i for i in images)])
def test_any_iterable_of_images_is_read_in_order(make: Callable[[list[str]], Any]) -> None:
    assert list(iter_images(make(["a", "b", "c"]))) == ["a", "b", "c"]


def test_an_array_of_four_dimensions_is_several_images() -> None:
    images = np.stack([noise(8, 8, seed) for seed in range(3)])
    for found, wanted in zip(iter_images(images), images, strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("images", "words"),
    [
        (b"\x89PNG", r"bytes, wanted .* or a list of them; open it with PIL.Image.open"),
        ({"a.png"}, "images: set, wanted a PIL image"),
        ({"a": "b"}, "images: dict, wanted a PIL image"),
        (None, "images: NoneType, wanted a PIL image"),
        (3.5, "images: float, wanted a PIL image"),
    ],
)
def test_what_is_no_list_of_images_is_refused(images: Any, words: str) -> None:  # noqa: ANN401
    with pytest.raises(InputTypeError, match=words):
        iter_images(images)
