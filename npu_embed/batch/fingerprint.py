"""What a job is: everything that decides the bytes of its output, so that no other is resumed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..api import __version__
from ..bundle import Bundle
from ..errors import BundleError, InputError
from ..manifest import sha256_file
from ..quantization import RANGES_FILE
from ..settings import kernels_dir
from .job import Job

if TYPE_CHECKING:
    from ..embedder import Embedder

# What the fields are called in a refusal, as far as they have other names there.
_SAID = {
    "bundle_sha256": "bundle (hash)",
    "input_sha256": "input (content hash)",
    "calibration": "int8 ranges",
    "shard_rows": "rows a shard",
    "id_column": "id column",
    "output": "output format",
}


def identity(
    embedder: Embedder, job: Job, dim: int, input_sha256: str, calibration: str
) -> dict[str, str]:
    """All that decides the bytes of a job's output, by name; it is kept with the output.

    on_error is not in it: rows that were skipped are an error when a job is to stop at them.

    Raises:
        BundleError: the bundle cannot be read.
    """
    prompt = job.prompt
    if prompt is None:
        prompt = embedder.bundle.manifest.params.get("default_prompt", "")
    return {
        "model": embedder.bundle.name,
        "bundle_sha256": bundle_hash(embedder.bundle),
        "device": embedder.device,
        "prompt": prompt,
        "dim": str(dim),
        "dtype": job.dtype,
        "calibration": calibration,
        "truncate": _yes_no(job.truncate),
        "plain_specials": _yes_no(embedder.plain_specials),
        "column": job.column,
        "id_column": job.id_column or "",
        "shard_rows": str(job.shard_rows),
        "output": job.format_name,
        "input_sha256": input_sha256,
        "version": __version__,
    }


def _yes_no(flag: bool) -> str:
    return "yes" if flag else "no"


def bundle_hash(bundle: Bundle) -> str:
    """The SHA-256 of every file of a bundle, and of those that NPU_EMBED_KERNELS puts before them.

    int8 ranges are left aside: they do not change a vector, and may be stored later.

    Raises:
        BundleError: a file cannot be read.
    """
    digest = hashlib.sha256()
    overrides = kernels_dir()
    try:
        for path in sorted(path for path in bundle.path.rglob("*") if path.is_file()):
            relative = path.relative_to(bundle.path).as_posix()
            if relative == RANGES_FILE:
                continue
            digest.update(f"{relative} {sha256_file(path)}\n".encode())
            if overrides is not None and (override := overrides / path.name).is_file():
                digest.update(f"{relative} {sha256_file(override)}\n".encode())
    except OSError as error:
        raise BundleError(f"{bundle.path}: {error}, wanted to read it whole.") from error
    return digest.hexdigest()


def differences(found: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    """What differs, in words: "dim 128 (wanted 64), prompt 'a' (wanted 'b')"."""
    return ", ".join(
        f"{_SAID.get(key, key)} {_shown(found.get(key, ''))} (wanted {_shown(value)})"
        for key, value in wanted.items()
        if found.get(key) != value
    )


def _shown(value: str) -> str:
    return (value if len(value) < 64 else f"{value[:12]}...") or "none"


def check_same(found: Mapping[str, str], wanted: Mapping[str, str], where: Path) -> None:
    """Check that an unfinished run is of the job that is asked for.

    Raises:
        InputError: it is another one; the message says in what.
    """
    if different := differences(found, wanted):
        raise InputError(
            f"{where}: an unfinished run with another {different}; run that command again to "
            "finish it, or pass --restart to begin anew."
        )
