"""Records: the lines a manifest consists of, read and written.

A record is a tag and fields separated by white space. What the tags mean is known above, in
manifest.py and specs.py; the format is specified in docs/bundle-format.md.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .errors import BundleError

MANIFEST = "manifest.txt"
MAX_MANIFEST_BYTES = 16 << 20
MAX_LINE_BYTES = 64 << 10
MAX_RECORDS = 200_000  # a real bundle has a few thousand

_TOKEN = re.compile(r"\S+")
# int() alone would also take "1_000" and digits of other scripts.
_INT = re.compile(r"-?[0-9]{1,19}", re.ASCII)
_REEXPORT = "re-export the bundle"

FieldValue = str | int | float | Sequence[int]


def parse_int(
    text: str, where: str, what: str, *, minimum: int | None = None, maximum: int | None = None
) -> int:
    """The integer that `text` spells in plain decimal digits, minimum <= integer <= maximum.

    Raises:
        BundleError: text is not such an integer; the message begins with `where: what`.
    """
    value = int(text) if _INT.fullmatch(text) else None
    low = -(2**63) if minimum is None else minimum
    high = 2**63 - 1 if maximum is None else maximum
    if value is None or not low <= value <= high:
        raise BundleError(
            f"{where}: {what} is {shown(text)}, wanted an integer {low} to {high}; {_REEXPORT}."
        )
    return value


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a manifest: a tag, then fields separated by white space.

    text is the line as written, without its end. line counts from 1 and is 0 for a record that
    was made rather than read; two records are equal if they say the same, wherever they stand.
    """

    tag: str
    fields: tuple[str, ...]
    line: int = field(default=0, compare=False)
    text: str = ""
    source: str = field(default=MANIFEST, compare=False)

    @property
    def where(self) -> str:
        """`manifest.txt:41`, the beginning of every error about this record."""
        return f"{self.source}:{self.line}"

    def error(self, problem: str, action: str = _REEXPORT) -> BundleError:
        """The error `manifest.txt:41: <problem>; <action>.`, for the caller to raise."""
        return BundleError(f"{self.where}: {problem}; {action}.")

    def field(self, index: int, what: str) -> str:
        """The field at `index` (the tag is not counted); `what` names it in the error."""
        if index >= len(self.fields):
            raise self.error(f"{self.tag} has {len(self.fields)} fields, wanted {what}")
        return self.fields[index]

    def field_int(
        self, index: int, what: str, *, minimum: int | None = None, maximum: int | None = None
    ) -> int:
        """The field at `index` as an integer within the bounds."""
        text = self.field(index, what)
        return parse_int(text, self.where, f"{self.tag} {what}", minimum=minimum, maximum=maximum)

    def field_hex(self, index: int, what: str) -> str:
        """The text whose UTF-8 bytes the field at `index` spells in hex; `-` is the empty text."""
        text = self.field(index, what)
        if text == "-":
            return ""
        try:
            return bytes.fromhex(text).decode("utf-8")
        except ValueError as exc:
            raise self.error(
                f"{self.tag} {what} is {shown(text)}, wanted UTF-8 text in hex"
            ) from exc

    def rest(self, count: int) -> str:
        """The raw text after `count` fields: one leading space removed, inner spacing kept."""
        tokens = list(_TOKEN.finditer(self.text))[: count + 1]
        return self.text[tokens[-1].end() :].removeprefix(" ") if len(tokens) > count else ""

    def has(self, key: str) -> bool:
        """Whether there is a field `key=...`."""
        return any(f.startswith(f"{key}=") for f in self.fields)

    def get(self, key: str) -> str:
        """The text after the first `=` of the field `key=...`; of several, the last one's."""
        for text in reversed(self.fields):
            if text.startswith(f"{key}="):
                return text[len(key) + 1 :]
        raise self.error(f"{self.tag} has no {key}=, wanted it")

    def get_int(self, key: str, *, minimum: int | None = None, maximum: int | None = None) -> int:
        """The value of `key=...` as an integer within the bounds."""
        return parse_int(
            self.get(key), self.where, f"{self.tag} {key}", minimum=minimum, maximum=maximum
        )

    def get_ints(
        self, key: str, *, minimum: int | None = None, maximum: int | None = None
    ) -> tuple[int, ...]:
        """The value of `key=1,2,3` as integers within the bounds; empty items are skipped."""
        what = f"{self.tag} {key}"
        items = [item for item in self.get(key).split(",") if item]
        return tuple(
            parse_int(i, self.where, what, minimum=minimum, maximum=maximum) for i in items
        )


def read_limited(path: Path) -> bytes:
    """The file's content, or as much of it as shows `parse_records` that it is too large."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_MANIFEST_BYTES + 1)
    except OSError as exc:
        raise BundleError(f"{path.name}: {exc.strerror}, wanted a file; {_REEXPORT}.") from exc


def parse_records(text: str | bytes, name: str = MANIFEST) -> tuple[Record, ...]:
    """The records that `text` spells, in order; blank lines and `#` comments are skipped.

    `name` begins the error messages.

    Raises:
        BundleError: text is larger than MAX_MANIFEST_BYTES, has a line longer than
            MAX_LINE_BYTES or more than MAX_RECORDS records, or is not UTF-8.
    """
    content = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if len(content) > MAX_MANIFEST_BYTES:
        raise BundleError(
            f"{name}: {len(content)} bytes or more, wanted at most {MAX_MANIFEST_BYTES}; "
            f"{_REEXPORT}."
        )
    records: list[Record] = []
    for number, raw in enumerate(content.split(b"\n"), start=1):
        where = f"{name}:{number}"
        if len(raw) > MAX_LINE_BYTES:
            raise BundleError(
                f"{where}: a line of {len(raw)} bytes, wanted at most {MAX_LINE_BYTES}; "
                f"{_REEXPORT}."
            )
        try:
            # Only \n ends a line; a \r before it belongs to the end, as in files from Windows.
            line = raw.removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError as exc:
            raise BundleError(
                f"{where}: byte {exc.start + 1} of the line is 0x{raw[exc.start]:02x}, wanted "
                f"UTF-8 text; {_REEXPORT}."
            ) from exc
        tokens = line.split()
        if tokens and not tokens[0].startswith("#"):
            if len(records) == MAX_RECORDS:
                raise BundleError(
                    f"{where}: more than {MAX_RECORDS} records, wanted at most that; {_REEXPORT}."
                )
            records.append(Record(tokens[0], tuple(tokens[1:]), number, line, name))
    return tuple(records)


def make_record(tag: str, *fields: str | int, **keys: FieldValue) -> Record:
    """The record `tag field ... key=value ...`; a sequence of integers becomes `1,2,3`.

    Raises:
        BundleError: a part is empty or has white space, so that it would not be read back.
    """
    parts = [tag, *(str(f) for f in fields)]
    parts += [f"{key}={_spelled(value)}" for key, value in keys.items()]
    for part in parts:
        if not _TOKEN.fullmatch(part):
            raise BundleError(
                f"{tag} record: {shown(part)}, wanted a field without white space; rename it."
            )
    return Record(tag, tuple(parts[1:]), text=" ".join(parts))


def make_param(name: str, value: FieldValue) -> Record:
    """The record `param name value`; the value's spaces are kept, inner and outer."""
    text = f"param {name} {_spelled(value)}"
    return Record("param", tuple(text.split()[1:]), text=text)


def hex_text(text: str) -> str:
    """The field that `Record.field_hex` reads back as `text`; `-` for the empty text."""
    return text.encode("utf-8").hex() or "-"


def write_records(records: Iterable[Record]) -> str:
    """The manifest text, a line a record; parsing it gives equal records.

    Raises:
        BundleError: a record would not survive: a line end in it, fields unlike its text, a tag
            that reads as a comment, characters UTF-8 cannot hold, or too much of it.
    """
    lines = []
    for record in records:
        text = record.text or " ".join((record.tag, *record.fields))
        survives = (
            text.split() == [record.tag, *record.fields]
            and not record.tag.startswith("#")
            and not re.search("[\r\n]", text)
            and (record.tag != "param" or len(record.fields) > 1)
        )
        if not survives:
            raise BundleError(
                f"{record.tag} record: {shown(text)} would not be read back as written, wanted "
                "one line of whole fields; change the value."
            )
        lines.append(text)
    written = "".join(f"{line}\n" for line in lines)
    parse_records(written, "manifest to write")
    return written


def shown(text: str) -> str:
    """The text as an error message quotes it: escaped, and cut where it is long."""
    return repr(text) if len(text) <= 80 else f"{text[:80]!r}... ({len(text)} characters)"


def _spelled(value: FieldValue) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, int | float):
        return repr(value)
    return ",".join(str(int(item)) for item in value)
