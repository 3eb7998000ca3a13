"""Images to vectors: a vision tower's soft tokens read by a text encoder."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .. import jit
from ..bf16 import F32
from ..errors import BundleError
from ..images import ImageLimits, Patches
from ..packing import make_packs
from ..schedule import SLOTS, run_together
from ..trace import Timing
from .gemma import Gemma
from .gemma4_vision import Gemma4Vision

# Packs of patches that are run in step: they share the tower's context switches, two a layer.
VISION_SLOTS = 4


class ImageEncoder:
    """A vision tower in front of a text encoder.

    frame [4, hidden_size]: the rows of bos and boi, which go before an image's soft tokens, and of
    eoi and eos, which follow them.
    """

    def __init__(self, text: Gemma, frame: F32) -> None:
        self._text = text
        self._frame = frame
        self._vision = Gemma4Vision(text.npu, text.bundle, text.params.hidden_size)
        longest = self.limits.max_soft_tokens + len(frame)
        if longest > text.max_rows:
            raise BundleError(
                f"manifest.txt: param max_rows {text.max_rows}, wanted at least the {longest} "
                "tokens of an image; re-export the bundle."
            )
        for a in text.params.attention.values() if text.params.attention_on_npu else ():
            if text.bundle.specs.mha_for(longest, a.bucket) is None:
                raise BundleError(
                    f"manifest.txt: no mha bucket for the {longest} tokens of an image; re-export "
                    "the bundle."
                )

    @property
    def limits(self) -> ImageLimits:
        """How images are prepared."""
        return self._vision.limits

    @property
    def vision_layers(self) -> int:
        """Layers of the vision tower."""
        return self._vision.params.num_hidden_layers

    def tokens(self, image: Patches) -> int:
        """How many tokens the text encoder reads for an image."""
        return len(image) // self.limits.pooling_kernel_size**2 + len(self._frame)

    def soft_tokens(self, images: Sequence[Patches], timing: Timing) -> list[F32]:
        """The soft tokens of each image, float32 [tokens, hidden_size of the text encoder].

        Raises:
            NoFreeContext, RunFailed, DeviceError: from the device.
        """
        vision, npu = self._vision, self._text.npu
        lengths = [len(image) for image in images]
        jit.note_rows(sum(lengths))
        packs = make_packs(lengths, vision.max_rows)
        found: dict[int, F32] = {}
        for first in range(0, len(packs), VISION_SLOTS):
            group = packs[first : first + VISION_SLOTS]
            npu.plan(vision.contexts())
            steps = [
                vision.steps([images[i] for i in pack.indices], pack, slot, timing)
                for slot, pack in enumerate(group)
            ]
            for pack, rows in zip(group, run_together(npu, steps, timing), strict=True):
                counts = [self.tokens(images[i]) - len(self._frame) for i in pack.indices]
                parts = np.split(rows, np.cumsum(counts)[:-1])
                found.update(zip(pack.indices, parts, strict=True))
        return [found[i] for i in range(len(images))]

    def embed(self, images: Sequence[Patches], timing: Timing) -> F32:
        """The vectors of images in their order, float32 [images, dim].

        Raises:
            NoFreeContext, RunFailed, DeviceError: from the device.
        """
        text, half = self._text, len(self._frame) // 2
        before, behind = self._frame[:half], self._frame[half:]
        rows = [np.vstack([before, soft, behind]) for soft in self.soft_tokens(images, timing)]
        packs = make_packs([len(x) for x in rows], text.max_rows)
        vectors: F32 = np.zeros((len(images), text.dim), dtype=np.float32)
        for first in range(0, len(packs), SLOTS):
            group = packs[first : first + SLOTS]
            text.npu.plan(text.contexts())
            steps = [
                text.encode(np.vstack([rows[i] for i in pack.indices]), pack, slot, timing)
                for slot, pack in enumerate(group)
            ]
            for pack, found in zip(group, run_together(text.npu, steps, timing), strict=True):
                vectors[list(pack.indices)] = found
        return vectors
