"""OpenAI's form of the embeddings API: its requests, answers and errors.

Source: https://platform.openai.com/docs/api-reference/embeddings; `prompt_name` and `truncate`
are ours.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import orjson

from ..bf16 import F32
from ..vectors import cut
from .refusals import Refusal, invalid
from .request import Request, read_dimensions, read_field, read_object, read_texts

FORMATS = ("float", "base64")
FIELDS = (
    "input",
    "model",
    "encoding_format",
    "dimensions",
    "user",
    "prompt_name",
    "truncate",
)
OWNER = "npu-embed"


@dataclass(frozen=True, slots=True)
class Form:
    """How an answer is wanted: the model's name as it was asked for, the form of the vectors.

    dim: how many numbers of each, None for all.
    """

    model: str
    encoding_format: Literal["float", "base64"]
    dim: int | None


def read(body: bytes, models: Collection[str], dim: int, most: int) -> tuple[Request, Form]:
    """What a body asks for; models: names that are served, most: texts of a request.

    Raises:
        Refusal: something in it is wrong.
    """
    fields = read_object(body, FIELDS)
    model = read_field(fields, "model", str)
    if model is None:
        raise invalid(f"model: missing, wanted {' or '.join(models)}.", "model")
    if model not in models:
        raise unknown_model(models)
    if "input" not in fields:
        raise invalid("input: missing, wanted texts.", "input")
    form = read_field(fields, "encoding_format", str, "float")
    if form not in FORMATS:
        raise invalid("encoding_format: unknown, wanted float or base64.", "encoding_format")
    read_field(fields, "user", str)
    texts, tokens = read_texts(fields["input"], "input", most)
    request = Request(
        field="input",
        texts=texts,
        tokens=tokens,
        prompt=read_field(fields, "prompt_name", str),
        truncate=read_field(fields, "truncate", bool),
    )
    return request, Form(model, form, read_dimensions(fields, dim))


def unknown_model(models: Collection[str]) -> Refusal:
    """No such model is served."""
    return Refusal(
        404,
        "model_not_found",
        f"model: unknown, this server has {', '.join(models)}.",
        param="model",
    )


def answer(form: Form, vectors: F32, tokens: int) -> bytes:
    """The answer's body: the vectors in the order of the texts, and the tokens computed.

    Raises:
        DeviceError: the numbers that are asked for of one are zero, so that they have no direction.
    """
    if form.dim is not None:
        vectors = cut(vectors, form.dim)
    rows: Sequence[Any]
    if form.encoding_format == "base64":
        little = np.ascontiguousarray(vectors, dtype="<f4")
        rows = [base64.b64encode(row).decode("ascii") for row in little]
    else:
        rows = list(np.ascontiguousarray(vectors))
    value = {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": row}
            for index, row in enumerate(rows)
        ],
        "model": form.model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def model(name: str, created: int) -> dict[str, Any]:
    """A model as `GET /v1/models` lists it; created in seconds since 1970."""
    return {"id": name, "object": "model", "created": created, "owned_by": OWNER}


def error(refusal: Refusal) -> bytes:
    """An error's body."""
    kind = {429: "rate_limit_error", 401: "authentication_error"}.get(refusal.status)
    if kind is None:
        kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    value = {
        "message": refusal.message,
        "type": kind,
        "param": refusal.param,
        "code": refusal.cause,
    }
    return orjson.dumps({"error": value})
