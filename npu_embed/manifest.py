"""A bundle's manifest: what its records say; and the files it names, reached safely.

A manifest is a stranger's file. Everything here is checked before use, and each error names the
manifest's line. The format is specified in docs/bundle-format.md.
"""

import hashlib
import math
import os
import posixpath
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PureWindowsPath
from typing import TypeVar

from .errors import BundleError
from .records import (
    MANIFEST,
    Record,
    hex_text,
    make_param,
    make_record,
    parse_int,
    parse_records,
    read_limited,
    shown,
    write_records,
)

__all__ = [
    "MANIFEST",
    "VERSION",
    "FileHash",
    "HashRecord",
    "Manifest",
    "Record",
    "XclbinRecord",
    "bundle_path",
    "check_sha256",
    "from_records",
    "hex_text",
    "make_param",
    "make_record",
    "sha256_file",
    "verify_sha256",
    "write_records",
]

VERSION = 1
MAX_PATH_BYTES = 1024

_FLOAT = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_REEXPORT = "re-export the bundle"

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class XclbinRecord:
    """`xclbin KEY FILE KERNEL_NAME`: an xclbin, its path relative to the bundle."""

    key: str
    file: str
    kernel_name: str
    line: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class HashRecord:
    """`sha256 FILE HEX`: the hash the file had when the bundle was written."""

    file: str
    wanted: str
    line: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class FileHash:
    """What `verify_sha256` found for one file; `found` is a hash, or why there is none."""

    file: str
    ok: bool
    found: str
    wanted: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest: all records in file order, and what the known ones among them say."""

    records: tuple[Record, ...]
    version: int
    params: Mapping[str, str]
    xclbins: Mapping[str, XclbinRecord]
    hashes: tuple[HashRecord, ...]
    name: str = field(default=MANIFEST, compare=False)
    param_lines: Mapping[str, int] = field(default_factory=dict, compare=False)

    @classmethod
    def parse(cls, text: str | bytes, name: str = MANIFEST) -> "Manifest":
        """The manifest that `text` spells; `name` begins the error messages.

        Raises:
            BundleError: text is too large, not UTF-8, or a known record is wrong.
        """
        return from_records(parse_records(text, name), name)

    @classmethod
    def read(cls, root: Path) -> "Manifest":
        """The manifest of the bundle in the folder `root`."""
        return cls.parse(read_limited(bundle_path(root, MANIFEST, str(root))))

    def tagged(self, tag: str) -> tuple[Record, ...]:
        """The records of one tag, in file order."""
        return tuple(r for r in self.records if r.tag == tag)

    def param_str(self, name: str, default: str | None = None) -> str:
        """The raw text of a param; its default where absent, an error where there is none."""
        value = self.params.get(name, default)
        if value is None:
            raise BundleError(f"{self.name}: param {name} is missing, wanted it; {_REEXPORT}.")
        return value

    def param_int(
        self,
        name: str,
        default: int | None = None,
        *,
        minimum: int | None = None,
        maximum: int | None = None,
    ) -> int:
        """A param as an integer within the bounds; they do not bind the default."""
        if default is not None and name not in self.params:
            return default
        text = self.param_str(name).strip()
        return parse_int(text, self._where(name), f"param {name}", minimum=minimum, maximum=maximum)

    def param_float(self, name: str, default: float | None = None) -> float:
        """A param as a finite number."""
        if default is not None and name not in self.params:
            return default
        text = self.param_str(name).strip()
        value = float(text) if _FLOAT.fullmatch(text) else math.nan
        if not math.isfinite(value):
            raise self._param_error(name, "a finite number")
        return value

    def param_flag(self, name: str, default: bool | None = None) -> bool:
        """A param that is 0 or 1."""
        if default is not None and name not in self.params:
            return default
        text = self.param_str(name).strip()
        if text not in ("0", "1"):
            raise self._param_error(name, "0 or 1")
        return text == "1"

    def param_list(self, name: str, default: Sequence[str] | None = None) -> tuple[str, ...]:
        """A param as a list separated by commas; empty items are skipped."""
        if default is not None and name not in self.params:
            return tuple(default)
        items = (item.strip() for item in self.param_str(name).split(","))
        return tuple(item for item in items if item)

    def param_ints(
        self, name: str, *, minimum: int | None = None, maximum: int | None = None
    ) -> tuple[int, ...]:
        """A param as a list of integers within the bounds."""
        where, what = self._where(name), f"param {name}"
        return tuple(
            parse_int(item, where, what, minimum=minimum, maximum=maximum)
            for item in self.param_list(name)
        )

    def _where(self, name: str) -> str:
        return f"{self.name}:{self.param_lines.get(name, 0)}"

    def _param_error(self, name: str, wanted: str) -> BundleError:
        found = shown(self.params[name])
        return BundleError(
            f"{self._where(name)}: param {name} is {found}, wanted {wanted}; {_REEXPORT}."
        )


def from_records(records: Iterable[Record], name: str = MANIFEST) -> Manifest:
    """The manifest that consists of `records`, with the known ones (see below) understood.

    `version`, `param`, `xclbin` and `sha256` are known here, `gemm` and its like in specs.py;
    an unknown tag is kept and means nothing.

    Raises:
        BundleError: a known record is wrong, comes twice, or there is no version.
    """
    kept = tuple(records)
    versions: list[int] = []
    params: dict[str, Record] = {}
    xclbins: dict[str, XclbinRecord] = {}
    hashes: dict[str, HashRecord] = {}
    for record in kept:
        if record.tag == "version":
            versions.append(_version(record, versions))
        elif record.tag == "param":
            _add(params, record.field(0, "NAME VALUE"), record, record)
            record.field(1, "NAME VALUE")
        elif record.tag == "xclbin":
            key, file, kernel_name = _positional(record, "KEY FILE KERNEL_NAME")
            _add(xclbins, key, XclbinRecord(key, file, kernel_name, record.line), record)
        elif record.tag == "sha256":
            file, wanted = _positional(record, "FILE HEX")
            if not _SHA256.fullmatch(wanted):
                raise record.error(f"sha256 is {shown(wanted)}, wanted 64 lower-case hex digits")
            _add(hashes, file, HashRecord(file, wanted, record.line), record)
    if not versions:
        raise BundleError(f"{name}: no version record, wanted `version {VERSION}`; {_REEXPORT}.")
    return Manifest(
        records=kept,
        version=versions[0],
        params={key: r.rest(1) for key, r in params.items()},
        xclbins=xclbins,
        hashes=tuple(hashes.values()),
        name=name,
        param_lines={key: r.line for key, r in params.items()},
    )


def bundle_path(root: Path, relative: str, where: str) -> Path:
    """The regular file `root/relative`, links below `root` resolved, certain to lie inside it.

    Nothing is opened. `where` (`manifest.txt:12`) begins the error message.

    Raises:
        BundleError: relative is empty, absolute, too long or has `..` or a NUL; the file is
            missing, leads out of root through a link, or is not a regular file.
    """

    def refused(found: str, action: str = _REEXPORT) -> BundleError:
        wanted = "wanted a regular file inside the bundle"
        return BundleError(f"{where}: {shown(relative)}: {found}, {wanted}; {action}.")

    if problem := _path_problem(relative):
        raise refused(problem)
    inside = True
    try:
        resolved = root / relative
        mode = _mode_without_links(root, relative)
        if mode is None:
            resolved = resolved.resolve(strict=True)
            mode = resolved.stat().st_mode
            inside = resolved.is_relative_to(root.resolve(strict=True))
    except FileNotFoundError as exc:
        raise refused("no such file") from exc
    except (OSError, RuntimeError) as exc:  # a loop of links is a RuntimeError before Python 3.13
        raise refused(f"cannot be reached ({exc})") from exc
    if not inside:
        raise refused("a link that leads out of the bundle", "copy the file itself into the bundle")
    if not stat.S_ISREG(mode):
        raise refused("not a regular file")
    return resolved


def _mode_without_links(root: Path, relative: str) -> int | None:
    """The mode of `root/relative`, None where a part of `relative` is a link.

    Without a link nor `..` it cannot leave root, which saves resolving root for each of its files.
    """
    path, mode = os.fspath(root), None
    for part in Path(relative).parts:
        path = os.path.join(path, part)
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode):
            return None
    return mode


def _path_problem(relative: str) -> str | None:
    """What is wrong with a path as written, before any file system sees it."""
    length_bytes = len(relative.encode("utf-8", "surrogatepass"))
    if length_bytes > MAX_PATH_BYTES:
        return f"a path of {length_bytes} bytes (at most {MAX_PATH_BYTES})"
    if not relative:
        return "an empty path"
    if "\0" in relative:
        return "a NUL in the path"
    # Both kinds of separators count, so that a bundle means the same on every system.
    path = PureWindowsPath(relative)
    if path.anchor:
        return "an absolute path"
    return "a path with `..`" if ".." in path.parts else None


def verify_sha256(root: Path, manifest: Manifest) -> Iterator[FileHash]:
    """What each `sha256` record wanted and what its file has now, in file order.

    Reads every byte of the files, so it is done on demand and one file at a time.
    """
    for record in manifest.hashes:
        try:
            found = sha256_file(bundle_path(root, record.file, f"{manifest.name}:{record.line}"))
        except (BundleError, OSError) as exc:
            found = str(exc)
        yield FileHash(record.file, found == record.wanted, found, record.wanted)


def check_sha256(root: Path, manifest: Manifest, used: Iterable[str]) -> None:
    """Check that every hashed file is as it was, and that every file of `used` is hashed.

    Raises:
        BundleError: naming the first file that is not.
    """
    hashed = {posixpath.normpath(record.file) for record in manifest.hashes}
    for file in used:
        if posixpath.normpath(file) not in hashed:
            raise BundleError(
                f"{manifest.name}: no sha256 record of {shown(file)}, wanted one of every file to "
                f"check them; {_REEXPORT}."
            )
    for file_hash in verify_sha256(root, manifest):
        if not file_hash.ok:
            raise BundleError(
                f"{file_hash.file}: sha256 {file_hash.found}, wanted {file_hash.wanted}; copy or "
                "download the bundle again."
            )


def sha256_file(path: Path) -> str:
    """The SHA-256 of the file's content, 64 lower-case hex digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _version(record: Record, earlier: Sequence[int]) -> int:
    if earlier:
        raise record.error("a second version record, wanted one")
    (text,) = _positional(record, "N")
    version = parse_int(text, record.where, "version")
    if version != VERSION:
        raise record.error(f"version {version}, this runtime reads {VERSION}")
    return version


def _positional(record: Record, what: str) -> tuple[str, ...]:
    """The record's fields, as many as `what` has words; after them only `key=value` may follow."""
    count = len(what.split())
    if len(record.fields) < count or not all("=" in extra for extra in record.fields[count:]):
        raise record.error(f"{record.tag} has {len(record.fields)} fields, wanted {what}")
    return record.fields[:count]


def _add(known: dict[str, _Value], key: str, value: _Value, record: Record) -> None:
    if key in known:
        raise record.error(f"{record.tag} {key} for the second time, wanted it once")
    known[key] = value
