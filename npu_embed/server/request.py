"""Request: what is asked for, whichever API asked; from fields of JSON, each checked by name."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import orjson

from .refusals import invalid, too_large


@dataclass(frozen=True, slots=True)
class Request:
    """Texts, or texts as token ids, and how their vectors are wanted.

    field is what the request called its texts, for errors; prompt a prompt's name; truncate None is
    what the server does by default.
    """

    field: str
    texts: list[str] | None
    tokens: list[list[int]] | None
    prompt: str | None = None
    truncate: bool | None = None

    def __len__(self) -> int:
        """How many texts."""
        return len(self.texts or self.tokens or ())


def read_object(body: bytes, known: Collection[str]) -> dict[str, Any]:
    """The JSON object of a body; fields that are null are as if they were not there.

    Raises:
        Refusal: it is no JSON, no object, or has a field that is not known.
    """
    try:
        value = orjson.loads(body)
    except (orjson.JSONDecodeError, RecursionError) as error:
        # Its message has no text of the body in it, only where and what.
        raise invalid(f"body: not JSON in UTF-8 ({error}), wanted an object.") from None
    if not isinstance(value, dict):
        raise invalid(f"body: {json_type(value)}, wanted a JSON object.")
    for name in value:
        if name not in known:
            shown = name if name.isidentifier() and len(name) <= 40 else "?"
            raise invalid(
                f"Unrecognized request argument supplied: {shown}; wanted {', '.join(known)}.",
                shown,
            )
    return {name: item for name, item in value.items() if item is not None}


def read_texts(
    value: object, field: str, most: int
) -> tuple[list[str], None] | tuple[None, list[list[int]]]:
    """The texts of a field, or their token ids: a str, strs, token ids, or lists of token ids.

    most: how many a request may have.

    Raises:
        Refusal: it is none of these, empty, or has more texts.
    """
    wanted = "a string, an array of strings, of token ids, or of arrays of token ids"
    if isinstance(value, str):
        return [value], None
    if not isinstance(value, list):
        raise invalid(f"{field}: {json_type(value)}, wanted {wanted}.", field)
    if not value:
        raise invalid(f"{field}: an empty array, wanted {wanted}.", field)
    kinds = set(map(type, value))
    if kinds == {int}:
        return None, [value]
    if kinds not in ({str}, {list}):
        odd = next((v for v in value if type(v) is not type(value[0])), value[0])
        raise invalid(f"{field}: an array with {json_type(odd)}, wanted {wanted}.", field)
    if len(value) > most:
        raise too_large(
            f"{field}: {len(value)} texts, this server takes at most {most} in a request; send "
            "them in several.",
            field,
        )
    if kinds == {str}:
        return value, None
    for index, ids in enumerate(value):
        if not ids or set(map(type, ids)) != {int}:
            what = f"an array of {json_type(ids[0])}" if ids else "an empty array"
            raise invalid(f"{field}[{index}]: {what}, wanted token ids.", field)
    return None, value


def read_field(fields: dict[str, Any], name: str, kind: type, default: Any = None) -> Any:  # noqa: ANN401
    """A field's value, of that type.

    Raises:
        Refusal: it has another type.
    """
    value = fields.get(name, default)
    if value is not default and type(value) is not kind:
        raise invalid(f"{name}: {json_type(value)}, wanted {_NAMES[kind]}.", name)
    return value


def read_dimensions(fields: dict[str, Any], dim: int) -> int | None:
    """The field `dimensions`, from 1 to dim; None where it is not there.

    Raises:
        Refusal: it is no such number.
    """
    wanted: int | None = read_field(fields, "dimensions", int)
    if wanted is not None and not 1 <= wanted <= dim:
        raise invalid(f"dimensions: {wanted}, wanted 1 to {dim}.", "dimensions")
    return wanted


_NAMES: dict[type, str] = {
    str: "a string",
    int: "an integer",
    float: "a number with a fraction",
    bool: "true or false",
    list: "an array",
    dict: "an object",
    type(None): "null",
}


def json_type(value: object) -> str:
    """A value's type as JSON calls it: "a string", "an array"."""
    return _NAMES.get(type(value), "something else")
