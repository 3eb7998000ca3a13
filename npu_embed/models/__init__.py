"""The model families, one file each, by Hugging Face's model_type."""

from __future__ import annotations

from .. import events
from ..bundle import Bundle
from ..device import Session
from ..errors import BundleError, DeviceError
from ..published import FAMILY as PUBLISHED
from .bert import Bert
from .embedding_gemma2 import EmbeddingGemma2
from .embedding_gemma2_published import EmbeddingGemma2Published
from .forward import Forward, forward, forward_together
from .gemma3_text import Gemma3Text
from .image_encoder import ImageEncoder
from .roberta import Roberta

FAMILIES: dict[str, type[Forward]] = {
    "bert": Bert,
    "roberta": Roberta,
    "xlm-roberta": Roberta,
    "distilbert": Bert,
    "gemma3_text": Gemma3Text,
    "embedding_gemma2": EmbeddingGemma2,
    PUBLISHED: EmbeddingGemma2Published,
}


def load(session: Session, bundle: Bundle, max_rows: int) -> Forward:
    """The bundle's model on a device, for packs of up to max_rows rows.

    Raises:
        BundleError: an unknown family, or parts its family needs are missing.
        DeviceError: the NPU is emulated, and the bundle's kernels are code for a real one.
    """
    if session.kind == "emulated" and not bundle.has_array_programs:
        raise DeviceError(
            f"{bundle.name}: its xclbins hold code for real AIE cores, which the emulated NPU "
            'cannot run; use device="npu" on a machine that has one, or export the bundle from '
            "its checkpoint."
        )
    family = FAMILIES.get(bundle.family)
    if family is None:
        raise BundleError(
            f"manifest.txt: param family {bundle.family}, this version runs "
            f"{', '.join(FAMILIES)}; update npu-embed."
        )
    model = family(session, bundle, max_rows)
    if events.listeners:
        events.note(events.Opened(bundle.name, bundle.family, session.kind, session.device_name))
    return model


def image_encoder(model: Forward) -> ImageEncoder | None:
    """What embeds images for a model; None where the bundle has texts only."""
    return model.images if isinstance(model, EmbeddingGemma2) else None


__all__ = [
    "FAMILIES",
    "Forward",
    "ImageEncoder",
    "forward",
    "forward_together",
    "image_encoder",
    "load",
]
