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
    """How an answer is wanted: whether of unit length, whatever the model's vectors are."""

    normalize: bool


def read(body: bytes, dim: int, most: int) -> tuple[Request, Form]:
    """What a body asks for; most: texts of a request.

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
        dim=read_dimensions(fields, dim),
        truncate=read_field(fields, "truncate", bool),
    )
    return request, Form(read_field(fields, "normalize", bool, True))


def answer(form: Form, vectors: F32) -> bytes:
    """The answer's body: an array of numbers for each text.

    Raises:
        DeviceError: a vector that is to be normalized is zero.
    """
    rows = normalized(vectors) if form.normalize else vectors
    return orjson.dumps(np.ascontiguousarray(rows), option=orjson.OPT_SERIALIZE_NUMPY)


def error(refusal: Refusal) -> bytes:
    """An error's body; the statuses are those of the other endpoints."""
    kind = _TYPES.get(refusal.status, "validation")
    return orjson.dumps({"error": refusal.message, "error_type": kind})
