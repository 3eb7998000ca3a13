"""A checkpoint's JSON files: typed values, and errors that name file, key, found and wanted."""

from __future__ import annotations

import json
import math
import reprlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import BundleError
from ..jsontext import check_values

MAX_JSON_BYTES = 64 << 20
MAX_INTEGER = 2**31 - 1  # where nothing else bounds it

# How errors quote a value: one of a stranger's files may be of any size and depth.
_QUOTE = reprlib.Repr()
_QUOTE.maxstring = _QUOTE.maxother = 80


def load_json(path: Path, name: str) -> object:
    """The value a JSON file holds.

    Raises:
        BundleError: no such file, no regular file, too large, not UTF-8, not JSON.
    """
    try:
        if path.exists() and not path.is_file():  # a FIFO would be waited for
            raise BundleError(
                f"{name}: no regular file, wanted one; download the checkpoint again."
            )
        with path.open("rb") as file:
            data = file.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise BundleError(
            f"{name}: {error.strerror or error}, wanted a readable file in {path.parent}; "
            "download the checkpoint again."
        ) from error
    if len(data) > MAX_JSON_BYTES:
        raise BundleError(f"{name}: over {MAX_JSON_BYTES} bytes, wanted JSON of a sane size.")
    check_values(name, data, "download the checkpoint again")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BundleError(
            f"{name}: {error}, wanted JSON; download the checkpoint again."
        ) from error


def quoted(value: object) -> str:
    """A JSON value as an error quotes it: cut where it is long or deep."""
    return _QUOTE.repr(value)


def named(text: str) -> str:
    """A name out of a stranger's file as an error has it: as it is, where it is short and plain."""
    return text if len(text) <= _QUOTE.maxstring and text.isprintable() else quoted(text)


def has_surrogate(text: str) -> bool:
    """Whether a text has half of a pair, which no UTF-8 holds and no file is called by."""
    return any("\ud800" <= char <= "\udfff" for char in text)


def one_of(values: Sequence[str]) -> str:
    """`'a', 'b' or 'c'`."""
    shown = [repr(value) for value in values]
    return shown[0] if len(shown) == 1 else ", ".join(shown[:-1]) + f" or {shown[-1]}"


@dataclass(frozen=True, slots=True)
class JsonFile:
    """A JSON object under the name its errors give it, e.g. `1_Pooling/config.json`.

    A key that holds null counts as absent, as it does for Hugging Face.
    """

    name: str
    values: Mapping[str, object]

    @classmethod
    def read(cls, folder: Path, relative: str) -> JsonFile:
        """The object in folder/relative.

        Raises:
            BundleError: it cannot be read or is no JSON object.
        """
        values = load_json(folder / relative, relative)
        if not isinstance(values, dict):
            raise BundleError(f"{relative}: a {type(values).__name__}, wanted a JSON object.")
        return cls(relative, values)

    @classmethod
    def read_if_there(cls, folder: Path, relative: str) -> JsonFile:
        """The object in folder/relative, an empty one where there is no such file."""
        if not (folder / relative).exists():
            return cls(relative, {})
        return cls.read(folder, relative)

    def part(self, key: str, *names: str) -> JsonFile:
        """The object at key, or at names further inside it, as `config.json: key`.

        Raises:
            BundleError: there is none.
        """
        value: object = self.values
        for name in (key, *names):
            value = value.get(name) if isinstance(value, Mapping) else None
        if not isinstance(value, dict):
            path = ".".join((key, *names))
            raise BundleError(f"{self.name}: no object {path}, wanted one; correct the file.")
        return JsonFile(f"{self.name}: {'.'.join((key, *names))}", value)

    def has(self, key: str) -> bool:
        """Whether key is there and not null."""
        return self.values.get(key) is not None

    def error(self, key: str, wanted: str, action: str) -> BundleError:
        """The error `config.json: key VALUE, wanted ...; action.`, for the caller to raise."""
        found = quoted(self.values[key]) if self.has(key) else "missing"
        return BundleError(f"{self.name}: {named(key)} {found}, wanted {wanted}; {action}.")

    def integer(
        self,
        key: str,
        default: int | None = None,
        *,
        minimum: int = 1,
        maximum: int | None = MAX_INTEGER,
    ) -> int:
        """The integer at key, minimum to maximum; the default where the key is absent."""
        if not self.has(key) and default is not None:
            return default
        value = self.values.get(key)
        if isinstance(value, float) and value.is_integer():  # 1e30 stands for "no limit"
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.error(key, f"an integer >= {minimum}", "correct the file")
        if maximum is not None and value > maximum:
            raise self.error(key, f"an integer {minimum} to {maximum}", "correct the file")
        return value

    def number(self, key: str, *, below: float = math.inf) -> float:
        """The finite number > 0 at key, which must be less than below."""
        value = self.values.get(key)
        most_float = sys.float_info.max  # an int may be larger
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not 0 < value < below
            or value > most_float
        ):
            most = "" if below == math.inf else f" and < {below:g}"
            raise self.error(key, f"a number > 0{most}", "correct the file")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """The string at key; the default where the key is absent."""
        if not self.has(key) and default is not None:
            return default
        value = self.values.get(key)
        if not isinstance(value, str):
            raise self.error(key, "a string", "correct the file")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """The boolean at key; the default where the key is absent."""
        if not self.has(key):
            return default
        value = self.values[key]
        if not isinstance(value, bool):
            raise self.error(key, "true or false", "correct the file")
        return value

    def choice(self, key: str, accepted: Sequence[str], default: str | None = None) -> str:
        """The string at key, which must be one of `accepted`."""
        if not self.has(key) and default is not None:
            return default
        value = self.values.get(key)
        if value not in accepted:
            raise self.error(key, one_of(accepted), "this exporter has no other kind")
        return str(value)
