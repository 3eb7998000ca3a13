"""Embedding images, for a bundle whose model sees them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import islice

import numpy as np

from .bf16 import F32
from .bundle import Bundle
from .errors import InputError
from .images import Images, Patches, iter_images, one_image, preprocess
from .models import ImageEncoder
from .stats import Tally
from .vectors import check_finite, checked_dim, cut

# Embedded together at most: they share context switches, and other threads wait meanwhile.
IMAGES_AT_ONCE = 8


class ImageQueries(ABC):
    """What an Embedder can do with images; it brings the model and its turns on the device."""

    @property
    @abstractmethod
    def bundle(self) -> Bundle:
        """The opened bundle."""

    @property
    @abstractmethod
    def dim(self) -> int:
        """The length of a vector."""

    @abstractmethod
    def _image_encoder(self) -> ImageEncoder | None:
        """What embeds images, None where the bundle has texts only."""

    @abstractmethod
    def _turn(self, call: Tally) -> AbstractContextManager[Tally]:
        """A turn on the device; what is counted in it goes to the totals and to call."""

    @abstractmethod
    def _recovered(self, forward: Callable[[], F32]) -> F32:
        """The vectors of a forward of images, verified, repeated once if it fails."""

    @abstractmethod
    def _ended(self, call: Tally) -> None:
        """A call has ended well."""

    def embed_image(self, images: Images, dim: int | None = None) -> F32:
        """The vectors of images, float32 [images, dim] in their order; of one image, [dim].

        They share a space with those of texts. An image is a PIL image, a path, or a uint8 array
        [height, width, 3]; for several, any iterable of images. Files and images that need
        resizing want Pillow: pip install 'npu-embed[images]'. dim: as for embed.

        The same call gives the same bits, whatever was embedded before; see embed.

        Raises:
            InputError, InputTypeError: the bundle has texts only, or an image or an argument cannot
                be used.
            NoFreeContext, RunFailed, DeviceError: from the device; the next call starts afresh.
        """
        encoder = self._image_encoder()
        if encoder is None:
            raise InputError(
                f"{self.bundle.name}: a bundle for texts only, wanted one that embeds images too; "
                "export a checkpoint that has a vision tower."
            )
        keep = checked_dim(dim, self.dim)
        call = Tally()
        image = one_image(images)
        waiting = iter_images(images) if image is None else iter([image])
        parts = [np.zeros((0, self.dim), dtype=np.float32)]
        first = 0
        while some := list(islice(waiting, IMAGES_AT_ONCE)):
            with call.timing.stage("preprocess"):
                patches = [
                    preprocess(one, encoder.limits, f"images[{first + i}]")
                    for i, one in enumerate(some)
                ]
            parts.append(self._embed_images(encoder, patches, first, call))
            first += len(some)
        self._ended(call)
        vectors: F32 = cut(np.concatenate(parts), keep, "images")
        return vectors if image is None else vectors[0]

    def _embed_images(
        self, encoder: ImageEncoder, images: list[Patches], first: int, call: Tally
    ) -> F32:
        with self._turn(call) as part:
            vectors = self._recovered(lambda: encoder.embed(images, part.timing))
            part.images = len(images)
            part.tokens = sum(encoder.tokens(image) for image in images)
        check_finite(vectors, range(first, first + len(images)), "images")
        return vectors
