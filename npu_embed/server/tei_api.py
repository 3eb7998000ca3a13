"""Text Embeddings Inference's form of the API: `POST /embed`.

Source: https://huggingface.github.io/text-embeddings-inference/.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import orjson

from ..bf16 import F32
from ..vectors import normalized
from .refusals import Refusal, invalid
from .request import Request, read_dimensions, read_field, read_object, read_texts

FIELDS = ("inputs", "normalize", "truncate", "truncation_direction", "prompt_name", "dimensions")

_TYPES = {
    401: "unauthorized",
    413: "validation",
    422: "tokenizer",
    424: "backend",
    429: "overloaded",
    500: "backend",
    503: "unhealthy",
}


@dataclass(frozen=True, slots=True)
class Form:
    """How an answer is wanted: whether of unit length, whatever the model's vectors are.

    dim: how many numbers of each vector, None for all.
    """

    normalize: bool
    dim: int | None


def read(body: bytes, dim: int, most: int, *, normalizes: bool) -> tuple[Request, Form]:
    """What a body asks for; most: texts of a request.

    normalizes: the model itself gives vectors of unit length, so that their length before is not
    known. The first numbers of a vector as it was then, which TEI gives, cannot be had.

    Raises:
        Refusal: something in it is wrong.
    """
    fields = read_object(body, FIELDS)
    if "inputs" not in fields:
        raise invalid("inputs: missing, wanted texts.", "inputs")
    direction = read_field(fields, "truncation_direction", str, "Right")
    if direction.lower() != "right":
        raise invalid(
            "truncation_direction: wanted Right, as this bundle's tokenizer cuts texts.",
            "truncation_direction",
        )
    texts, tokens = read_texts(fields["inputs"], "inputs", most)
    request = Request(
        field="inputs",
        texts=texts,
        tokens=tokens,
        prompt=read_field(fields, "prompt_name", str),
        truncate=read_field(fields, "truncate", bool),
    )
    form = Form(read_field(fields, "normalize", bool, True), read_dimensions(fields, dim))
    if form.dim is not None and not form.normalize and normalizes:
        raise invalid(
            "normalize: false with dimensions, wanted true: this model scales its vectors to unit "
            "length itself, and the first numbers of unscaled ones are not known; leave one of "
            "the two out.",
            "normalize",
        )
    return request, form


def answer(form: Form, vectors: F32) -> bytes:
    """The answer's body: an array of numbers for each text.

    Raises:
        DeviceError: a vector that is to be normalized is zero.
    """
    rows = vectors[:, : form.dim]
    if form.normalize:
        rows = normalized(rows)
    return orjson.dumps(np.ascontiguousarray(rows), option=orjson.OPT_SERIALIZE_NUMPY)


def error(refusal: Refusal) -> bytes:
    """An error's body; the statuses are those of the other endpoints."""
    kind = _TYPES.get(refusal.status, "validation")
    return orjson.dumps({"error": refusal.message, "error_type": kind})
