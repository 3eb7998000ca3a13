"""Checkpoint folder -> bundle folder: all of it, or nothing.

The bundle is written beside its place and moved there when it is whole, so that nobody ever opens
half of one. The same checkpoint gives the same bytes.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from ..bundle import Bundle
from ..errors import FetchError, InputError
from ..lint import check_lint
from ..manifest import MANIFEST, VERSION, sha256_file
from ..paths import as_path
from ..records import Record, make_record, write_records
from ..tensors import SAFETENSORS, TENSORS_BIN, TENSORS_TXT, write_safetensors
from ..tensors_txt import write_tensors_txt
from .bert import bert_parts
from .bert_families import FAMILIES as BERT_FAMILIES
from .checkpoint import TOKENIZER, Checkpoint, open_checkpoint
from .embedding_gemma2 import embedding_gemma2_parts
from .embedding_gemma2_config import MODEL_TYPE as EMBEDDING_GEMMA2
from .gemma3_config import MODEL_TYPE as GEMMA3_TEXT
from .gemma3_text import gemma3_parts
from .jsonfile import one_of
from .kernels import TARGETS
from .parts import ATTENTIONS, LAYOUTS, Options, Parts, Progress, no_progress
from .published import published_parts

logger = logging.getLogger(__name__)

# Counts up whenever the same checkpoint would give other bytes.
EXPORTER_VERSION = 2

FAMILIES: dict[str, Callable[[Checkpoint, Options, Progress], Parts]] = {
    **dict.fromkeys(BERT_FAMILIES, bert_parts),
    GEMMA3_TEXT: gemma3_parts,
    EMBEDDING_GEMMA2: embedding_gemma2_parts,
}

PUBLISHED: dict[str, Callable[[Checkpoint, Options, Progress], Parts]] = {
    EMBEDDING_GEMMA2: published_parts,
}

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("*.json", "*/config.json", "model.safetensors", "*/model.safetensors")


def export_checkpoint(
    checkpoint: str | Path,
    out: str | Path,
    *,
    force: bool = False,
    target: str = "npu2",
    name: str | None = None,
    attention: str | None = None,
    layout: str = "npu-embed",
    progress: Progress | None = None,
) -> Path:
    """The bundle folder `out`, made from a checkpoint folder or a Hugging Face hub id.

    force replaces a bundle that is already at `out`; target is the NPU generation (npu2, npu1);
    name is what the bundle calls itself, else the checkpoint folder's name; attention is where a
    family that can do either computes it, npu or host (None: npu); layout is npu-embed's own, or
    "published", as taconite reads it, whose attention is the host's. On failure `out` is as it was
    before.

    Raises:
        InputError: checkpoint or out cannot be used: no such folder, out is taken.
        BundleError: the checkpoint is damaged or not what this engine computes, or the bundle
            made of it is not sound.
        FetchError: the hub did not deliver.
    """
    progress = progress or no_progress
    if not isinstance(target, str) or target not in TARGETS:
        raise InputError(f"target={target!r}: unknown NPU, wanted {one_of(list(TARGETS))}.")
    if layout not in LAYOUTS:
        raise InputError(f"layout={layout!r}: unknown, wanted {one_of(LAYOUTS)}.")
    published = layout == "published"
    if attention is None:
        attention = "host" if published else "npu"
    if attention not in ATTENTIONS:
        raise InputError(f"attention={attention!r}: unknown, wanted {one_of(ATTENTIONS)}.")
    if published and attention != "host":
        raise InputError(
            f"attention={attention!r}: the published layout has a text's attention on the host, "
            "wanted 'host'; or export in npu-embed's own layout."
        )
    out = as_path("out", out)
    folder, found_name = _checkpoint_folder(checkpoint)
    _check_out(out, folder, force)
    opened = open_checkpoint(folder)
    families = PUBLISHED if published else FAMILIES
    family = opened.config.choice("model_type", list(families))
    parts = families[family](opened, Options(target, name or found_name, attention), progress)
    try:
        with _replacing(out) as staging:
            _write(staging, parts, opened, progress)
            _lint(staging)
    except OSError as error:
        raise InputError(
            f"{out}: {error.strerror or error}, wanted to write the bundle there; make room or "
            "choose another place."
        ) from error
    logger.info("%s: exported %s for %s", out, folder, target)
    return out


def _checkpoint_folder(checkpoint: str | Path) -> tuple[Path, str]:
    """(the folder, a name for the model)."""
    folder = as_path("checkpoint", checkpoint)
    is_folder = os.path.isdir(folder)  # Path.is_dir raises where the name is too long
    if not is_folder and _HUB_ID.fullmatch(str(checkpoint)):
        return _from_hub(str(checkpoint)), str(checkpoint)
    if not is_folder:
        raise InputError(
            f"{folder}: no such folder, wanted a checkpoint (config.json, model.safetensors, "
            "tokenizer.json) or a hub id like org/name."
        )
    resolved = folder.resolve()
    return resolved, " ".join(resolved.name.split()) or "model"


def _from_hub(repo_id: str) -> Path:
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise InputError(
            f"{repo_id}: no such folder, and to fetch it from the hub huggingface_hub is wanted; "
            "pip install 'npu-embed[hub]' or download the folder yourself."
        ) from error
    try:
        return Path(hub.snapshot_download(repo_id, allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # the library raises its own, requests', httpx' and OSError
        raise FetchError(
            f"{repo_id}: not fetched from the hub, wanted its files; check name and network, or "
            f"download the folder yourself. The hub said: {error}"
        ) from error


def _check_out(out: Path, checkpoint: Path, force: bool) -> None:
    place = out.resolve()
    if place.is_relative_to(checkpoint) or checkpoint.is_relative_to(place):
        raise InputError(
            f"{out}: in or around the checkpoint {checkpoint}, wanted a place of its own."
        )
    if not out.parent.is_dir():
        raise InputError(f"{out}: {out.parent} is no folder, wanted one; create it first.")
    if not os.path.lexists(out):
        return
    if not force:
        raise InputError(f"{out}: exists, wanted a new folder; choose another or pass force=True.")
    # Force is for replacing a bundle: it must not delete what somebody typed by mistake.
    is_bundle = out.is_dir() and ((out / MANIFEST).is_file() or not any(out.iterdir()))
    if out.is_symlink() or not is_bundle:
        found = "a link" if out.is_symlink() else f"not a bundle (no {MANIFEST} in it)"
        raise InputError(f"{out}: {found}, wanted a bundle to replace; choose another place.")


@contextlib.contextmanager
def _replacing(out: Path) -> Iterator[Path]:
    """A new folder beside `out` that becomes `out` if the block succeeds."""
    staging = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".new", dir=out.parent))
    try:
        yield staging
        staging.chmod(0o777 & ~_umask())
        _move_into_place(staging, out)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _move_into_place(staging: Path, out: Path) -> None:
    """Rename staging to out; what was there is set aside until that has worked, then deleted."""
    if not os.path.lexists(out):
        staging.rename(out)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".old", dir=out.parent))
    old = aside / out.name
    out.rename(old)
    try:
        staging.rename(out)
    except BaseException:
        old.rename(out)
        aside.rmdir()
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _write(folder: Path, parts: Parts, checkpoint: Checkpoint, progress: Progress) -> None:
    progress("write", 0, 1)
    (folder / "kernels").mkdir()
    for path, content in parts.files.items():
        (folder / path).write_bytes(content)
    if parts.published:
        files = [TENSORS_TXT, TENSORS_BIN, *parts.files]
        write_tensors_txt(folder, parts.tensors, parts.bf16)
    else:
        files = [SAFETENSORS, TOKENIZER, *parts.files]
        shutil.copyfile(checkpoint.tokenizer_path, folder / TOKENIZER)
        write_safetensors(folder / SAFETENSORS, parts.tensors, parts.bf16)
    progress("write", 1, 1)
    hashes: list[Record] = []
    for done, path in enumerate(files):
        progress("hash", done, len(files))
        hashes.append(make_record("sha256", path, sha256_file(folder / path)))
    records = (make_record("version", VERSION), *parts.records, *hashes)
    (folder / MANIFEST).write_text(write_records(records), encoding="utf-8", newline="\n")
    progress("hash", len(files), len(files))


def _lint(folder: Path) -> None:
    """Refuse a bundle whose kernels have a flaw that shows without running them."""
    bundle = Bundle.open(folder, overrides=False)
    try:
        check_lint(bundle)
    finally:
        bundle.close()
