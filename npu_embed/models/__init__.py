"""The model families, one file each, by Hugging Face's model_type."""

from __future__ import annotations

from ..bundle import Bundle
from ..device import Session
from ..errors import BundleError
from .bert import Bert
from .forward import Forward

FAMILIES: dict[str, type[Forward]] = {"bert": Bert}


def load(session: Session, bundle: Bundle, max_rows: int) -> Forward:
    """The bundle's model on a device, for packs of up to max_rows rows.

    Raises:
        BundleError: an unknown family, or parts its family needs are missing.
    """
    family = FAMILIES.get(bundle.family)
    if family is None:
        raise BundleError(
            f"manifest.txt: param family {bundle.family}, this version runs "
            f"{', '.join(FAMILIES)}; update npu-embed."
        )
    return family(session, bundle, max_rows)


__all__ = ["FAMILIES", "Forward", "load"]
