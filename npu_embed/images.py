"""Images to patches, as transformers' Gemma 4 image processor makes them.

An image is resized so that its patches fill the model's budget, its sides whole numbers of pooled
blocks and nearly in the proportions they had; then it is cut into patches, row by row. Pillow
decodes and resizes; it is imported where it is needed, and an array that needs no resizing does
without.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from .errors import InputError, InputTypeError

if TYPE_CHECKING:
    from PIL import Image

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
ImageLike: TypeAlias = "Image.Image | str | os.PathLike[str] | U8"
Images: TypeAlias = "ImageLike | Iterable[ImageLike]"

CHANNELS = 3
WANTED = "wanted a PIL image, a path or a uint8 array [height, width, 3]"


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """How a model sees an image; transformers' names.

    A patch is patch_size x patch_size pixels; pooling_kernel_size x pooling_kernel_size patches
    become a soft token, of which there are at most max_soft_tokens.
    """

    patch_size: int
    pooling_kernel_size: int
    max_soft_tokens: int

    @property
    def max_patches(self) -> int:
        """The most patches of one image."""
        return self.max_soft_tokens * self.pooling_kernel_size**2

    @property
    def block_pixels(self) -> int:
        """The side of what becomes a soft token."""
        return self.pooling_kernel_size * self.patch_size


@dataclass(frozen=True, slots=True)
class Patches:
    """An image cut up: values uint8 [patches, patch_size * patch_size * 3], row by row.

    A patch's values are its pixels row by row, red, green, blue of each. columns: patches side by
    side.
    """

    values: U8
    columns: int

    def __len__(self) -> int:
        return len(self.values)

    @property
    def rows(self) -> int:
        """Patches one above the other."""
        return len(self.values) // self.columns

    @property
    def pixels(self) -> F32:
        """The values from 0 to 1, float32."""
        scaled: F32 = self.values / np.float32(255)
        return scaled

    @property
    def positions(self) -> NDArray[np.int32]:
        """(x, y) of every patch in units of patches, int32 [patches, 2]."""
        y, x = np.divmod(np.arange(len(self.values), dtype=np.int32), np.int32(self.columns))
        return np.stack([x, y], axis=1)


def target_size(height: int, width: int, limits: ImageLimits) -> tuple[int, int]:
    """The height and width an image is resized to, in pixels.

    The largest whole blocks that fit its proportions and the budget; a side that would have none
    gets one, and the other what fits beside it.

    Source: transformers, Gemma4ImageProcessor.
    """
    block = limits.block_pixels
    budget = limits.max_patches * limits.patch_size**2
    factor = math.sqrt(budget / (height * width))
    rows, columns = int(factor * height // block), int(factor * width // block)
    # Never both: a budget of a block or more has a side of a block or more.
    if rows == 0:
        rows, columns = 1, min(width // height, limits.max_soft_tokens)
    elif columns == 0:
        rows, columns = min(height // width, limits.max_soft_tokens), 1
    return rows * block, columns * block


def cut(rgb: U8, patch_size: int) -> Patches:
    """The patches of an image whose sides are whole patches; rgb [height, width, 3]."""
    rows, columns = rgb.shape[0] // patch_size, rgb.shape[1] // patch_size
    blocks = rgb.reshape(rows, patch_size, columns, patch_size, CHANNELS).transpose(0, 2, 1, 3, 4)
    return Patches(np.ascontiguousarray(blocks).reshape(rows * columns, -1), columns)


def preprocess(image: ImageLike, limits: ImageLimits, where: str = "image") -> Patches:
    """The patches of an image; `where` (`images[3]`) begins the error messages.

    A file is turned as its EXIF orientation says, an image in memory is taken as it is. Alpha is
    dropped, other colours become RGB; of an animation it is the first frame.

    Raises:
        InputTypeError: it is no image, or an array of another dtype.
        InputError: an array of another shape or without pixels, a file that is missing or no
            image, or Pillow is needed and not installed.
    """
    if isinstance(image, np.ndarray):
        rgb = _checked_array(image, where)
    elif isinstance(image, str | os.PathLike):
        rgb = _read(image, where)
    elif _is_pil(image):
        rgb = _as_array(image, where)
    else:
        raise InputTypeError(f"{where}: {type(image).__name__}, {WANTED}.")
    size = target_size(rgb.shape[0], rgb.shape[1], limits)
    if size != rgb.shape[:2]:
        rgb = _resized(rgb, size, where)
    return cut(rgb, limits.patch_size)


def one_image(images: Images) -> ImageLike | None:
    """What is an image and not several of them; None where it may be several."""
    if isinstance(images, np.ndarray):
        one = images.ndim <= CHANNELS
    else:
        one = isinstance(images, str | os.PathLike) or _is_pil(images)
    return cast("ImageLike", images) if one else None


def iter_images(images: Images) -> Iterator[ImageLike]:
    """The images, one by one as they are asked for.

    Any iterable of images, by position; an array [images, height, width, 3] too.

    Raises:
        InputTypeError: at once if images is no such iterable.
    """
    wanted = f"{WANTED}, or a list of them"
    if isinstance(images, bytes | bytearray | memoryview):
        raise InputTypeError(
            f"images: {type(images).__name__}, {wanted}; open it with PIL.Image.open(io.BytesIO())."
        )
    if isinstance(images, AbstractSet | Mapping) or not isinstance(images, Iterable):
        raise InputTypeError(f"images: {type(images).__name__}, {wanted}.")
    return iter(images)


def _is_pil(image: object) -> bool:
    """Whether it is a PIL image; there is none where PIL was never imported."""
    module: Any = sys.modules.get("PIL.Image")
    return module is not None and isinstance(image, module.Image)


def _checked_array(array: NDArray[Any], where: str) -> U8:
    shape = "x".join(map(str, array.shape))
    if array.dtype != np.uint8:
        raise InputTypeError(
            f"{where}: {array.dtype} array, wanted uint8 from 0 to 255; convert it first."
        )
    if array.ndim != CHANNELS or array.shape[2] != CHANNELS:
        raise InputError(f"{where}: array {shape}, wanted [height, width, {CHANNELS}].")
    if not array.size:
        raise InputError(f"{where}: array {shape}, wanted at least one pixel.")
    return np.ascontiguousarray(array)


def _pillow(where: str) -> None:
    """Raises: InputError where Pillow is not installed."""
    try:
        import PIL.Image
        import PIL.ImageOps  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"{where}: Pillow is not installed, wanted it to read and resize images; "
            "pip install 'npu-embed[images]'."
        ) from error


def _read(path: str | os.PathLike[str], where: str) -> U8:
    _pillow(where)
    from PIL import Image, ImageOps

    shown = repr(os.fspath(path))
    try:
        if not Path(path).is_file():  # a FIFO would be waited for
            raise FileNotFoundError("no such file")
        with Image.open(path) as image:
            upright = ImageOps.exif_transpose(image)
            return _as_array(upright, where)
    except InputError:
        raise
    except Exception as error:  # every decoder has its own: OSError, SyntaxError, struct.error ...
        raise InputError(
            f"{where}: {shown}: {error}, wanted an image file; check the path and the file."
        ) from error


def _as_array(image: Image.Image, where: str) -> U8:
    if not all(image.size):
        width, height = image.size
        raise InputError(f"{where}: {width} x {height} pixels, wanted at least one pixel.")
    try:
        rgb = np.asarray(image if image.mode == "RGB" else image.convert("RGB"))
    except Exception as error:  # a file is decoded only now
        raise InputError(f"{where}: {error}, wanted an image that can be decoded.") from error
    return rgb


def _resized(rgb: U8, size: tuple[int, int], where: str) -> U8:
    _pillow(where)
    from PIL import Image

    height, width = size
    image = Image.fromarray(rgb).resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(image)
