"""Canaries: a text and an image whose vectors are known, computed where everything else is."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from . import models, published
from .bf16 import F32
from .bundle import Bundle
from .errors import InputError, RunFailed
from .imagecheck import read_image_references
from .images import preprocess
from .models import Forward
from .nearness import MIN_COSINE, Nearness
from .packing import make_packs
from .trace import Timing

log = logging.getLogger("npu_embed")

ANY_TOKEN = 0  # an id that every vocabulary has


class Canary:
    """Something small to embed, and what is known of its vector.

    reference: the stored float32 vector, which the first one must be near to; None where the bundle
    has none: then the first one is computed twice. Every later one must be the same bits as
    the first.
    """

    def __init__(
        self, name: str, embed: Callable[[], F32], reference: F32 | None, min_cosine: float
    ) -> None:
        self.name = name
        self._embed = embed
        self._reference = reference
        self._min_cosine = min_cosine
        self._known: bytes | None = None

    def check(self) -> None:
        """Embed it and compare.

        Raises:
            RunFailed: the vector is another than the known one.
            NoFreeContext, DeviceError: from the device.
        """
        vector = self._embed()
        if self._known is not None:
            self._check_same(vector, self._known)
            return
        if self._reference is None:
            self._check_same(self._embed(), vector.tobytes())
        else:
            self._check_near(vector, self._reference)
        self._known = vector.tobytes()

    def _check_same(self, vector: F32, known: bytes) -> None:
        if vector.tobytes() != known or not np.isfinite(vector).all():
            raise RunFailed(
                f"canary ({self.name}): not the vector it was before on the same kernels, wanted "
                "the same bits; the NPU's results cannot be trusted. Run `npu-embed doctor`."
            )

    def _check_near(self, vector: F32, reference: F32) -> None:
        nearness = Nearness.of_embeddings([reference], self._min_cosine)
        same_length = vector.shape == reference.shape
        if same_length:
            nearness.add(vector[None], reference[None], self.name)
        if not same_length or not nearness.good:
            found = nearness.detail if same_length else f"{len(vector)} numbers"
            raise RunFailed(
                f"canary ({self.name}): its vector is not the stored one: {found}; kernels or NPU "
                "compute wrongly. Run `npu-embed check` on the bundle, then `npu-embed doctor`."
            )


def text_canary(model: Forward, bundle: Bundle) -> Canary | None:
    """The bundle's shortest self-check text, else a single token; None where it embeds no texts.

    Raises:
        BundleError: the text's tensors are missing or damaged.
    """
    if not bundle.max_tokens:
        return None
    stored: list[tuple[int, str, NDArray[np.int32]]] = []
    for record in bundle.manifest.tagged("tref"):
        index = record.field(0, "INDEX PROMPT HEX")
        ids = bundle.tensors.i32(f"tref.{index}.ids", (None,))
        if 1 <= len(ids) <= bundle.max_tokens:
            stored.append((len(ids), index, ids))
    if stored:
        _, index, ids = min(stored, key=lambda one: one[:2])
        name = f"text {index}"
        reference = bundle.tensors.f32(f"tref.{index}.embedding", (None,))
    else:
        name, reference = "a token", None
        ids = np.array([ANY_TOKEN], dtype=np.int32)
    (pack,) = make_packs([len(ids)], model.max_rows)

    def embed() -> F32:
        vector: F32 = models.forward(model, [ids], pack, Timing())[0]
        return vector

    return Canary(name, embed, reference, _lowest(bundle))


def image_canary(model: Forward, bundle: Bundle) -> Canary | None:
    """The bundle's first self-check image; None where it has none.

    Raises:
        BundleError: the image's tensors are missing or damaged.
    """
    encoder = models.image_encoder(model)
    if encoder is None or not bundle.manifest.tagged("ref"):
        return None
    reference = read_image_references(bundle)[0]
    try:
        patches = preprocess(reference.rgb, encoder.limits, f"ref {reference.name}")
    except InputError as error:  # it needs resizing, and there is no Pillow
        log.warning("images are not verified: %s", error)
        return None

    def embed() -> F32:
        vector: F32 = encoder.embed([patches], Timing())[0]
        return vector

    return Canary(f"image {reference.name}", embed, reference.embedding, _lowest(bundle))


def _lowest(bundle: Bundle) -> float:
    return published.MIN_COSINE if bundle.published else MIN_COSINE
