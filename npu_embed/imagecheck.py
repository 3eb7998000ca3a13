"""A bundle's images checked where it runs: pixels, positions, soft tokens and vectors.

The numbers are compared with those stored in the bundle when it was exported; see nearness.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .bf16 import F32
from .bundle import Bundle
from .images import CHANNELS, Patches, preprocess
from .models import ImageEncoder
from .nearness import MIN_COSINE, Nearness
from .outcomes import Outcome, Status
from .trace import Timing

TEXTS = "ref.texts"
MAX_PIXEL_ERROR = 1e-6  # of values from 0 to 1, whose steps are 1/255


@dataclass(frozen=True, slots=True)
class ImageReference:
    """An image's stored forward.

    rgb [height, width, 3], pixels [patches, values], positions [patches, 2], soft [tokens,
    hidden_size], embedding [dim].
    """

    name: str
    rgb: NDArray[np.uint8]
    pixels: F32
    positions: NDArray[np.int32]
    soft: F32
    embedding: F32


def read_image_references(bundle: Bundle) -> tuple[ImageReference, ...]:
    """The image references of a bundle.

    Raises:
        BundleError: a record is damaged, or a tensor is missing or of another shape.
    """
    references = []
    for record in bundle.manifest.tagged("ref"):
        name = record.field(0, "NAME WIDTH HEIGHT")
        width, height = (
            record.field_int(i, "NAME WIDTH HEIGHT", minimum=1, maximum=1 << 16) for i in (1, 2)
        )
        prefix, tensors = f"ref.{name}", bundle.tensors
        pixels = tensors.f32(f"{prefix}.pixels", (None, None))
        rgb = tensors.u8(f"{prefix}.rgb", (height, width, CHANNELS))
        references.append(
            ImageReference(
                name=name,
                rgb=rgb,
                pixels=pixels,
                positions=tensors.i32(f"{prefix}.positions", (len(pixels), 2)),
                soft=tensors.f32(f"{prefix}.soft", (None, None)),
                embedding=tensors.f32(f"{prefix}.embedding", (None,)),
            )
        )
    return tuple(references)


def read_texts(bundle: Bundle) -> F32 | None:
    """The vectors of the texts that images are compared with, [texts, dim]; None without any."""
    dim = bundle.manifest.param_int("dim")
    return bundle.tensors.f32(TEXTS, (None, dim)) if bundle.tensors.has(TEXTS) else None


def check_images(
    encoder: ImageEncoder,
    references: Sequence[ImageReference],
    min_cosine: float = MIN_COSINE,
    texts: F32 | None = None,
) -> Iterator[Outcome]:
    """Whether images are prepared as they were, and what they become.

    min_cosine: of a vector with its reference. texts [texts, dim]: vectors, the nearest of which
    must be the reference's nearest too.

    Raises:
        InputError: an image needs resizing, and Pillow is not installed.
        NoFreeContext, RunFailed, DeviceError: from the device.
    """
    images = [preprocess(r.rgb, encoder.limits, f"ref {r.name}") for r in references]
    odd = [r.name for r, image in zip(references, images, strict=True) if not _same(r, image)]
    status: Status = "FAIL" if odd else "PASS"
    detail = f"{len(images) - len(odd)} of {len(images)} images prepared alike"
    figures: dict[str, int | float | str] = {"images": len(images), "equal": len(images) - len(odd)}
    yield Outcome("pixels", status, f"{detail}: {', '.join(odd)}" if odd else detail, figures)

    timing = Timing()
    soft = Nearness.of_stage(encoder.vision_layers)
    embedding = Nearness.of_embeddings([r.embedding for r in references], min_cosine)
    rows, vectors = encoder.soft_tokens(images, timing), encoder.embed(images, timing)
    for r, found, vector in zip(references, rows, vectors, strict=True):
        for name, nearness, a, b in (
            ("soft tokens", soft, found, r.soft),
            ("image vector", embedding, vector[None], r.embedding[None]),
        ):
            if a.shape != b.shape:
                detail = f"{r.name}: {list(a.shape)}, the reference has {list(b.shape)}"
                yield Outcome(name, "FAIL", detail)
                return
            nearness.add(a, b, r.name)
    for name, nearness in (("soft tokens", soft), ("image vector", embedding)):
        good: Status = "PASS" if nearness.good else "FAIL"
        yield Outcome(name, good, nearness.detail, nearness.figures)
    if texts is not None:
        yield _nearest_text(references, vectors, texts)


def _nearest_text(references: Sequence[ImageReference], vectors: F32, texts: F32) -> Outcome:
    wanted = [int(np.argmax(texts @ r.embedding)) for r in references]
    odd = [
        r.name
        for r, vector, index in zip(references, vectors, wanted, strict=True)
        if int(np.argmax(texts @ vector)) != index
    ]
    detail = f"{len(wanted) - len(odd)} of {len(wanted)} images nearest to the same text"
    figures: dict[str, int | float | str] = {"images": len(wanted), "texts": len(texts)}
    detail = f"{detail}: not {', '.join(odd)}" if odd else detail
    return Outcome("nearest text", "FAIL" if odd else "PASS", detail, figures)


def _same(reference: ImageReference, image: Patches) -> bool:
    return (
        image.pixels.shape == reference.pixels.shape
        and float(np.abs(image.pixels - reference.pixels).max()) <= MAX_PIXEL_ERROR
        and np.array_equal(image.positions, reference.positions)
    )
