"""Shipped: a bundle in Ray's object store, for nodes that have no copy of it.

Needs the extra `ray`.
"""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import numpy as np

from .. import settings
from ..bundle import Bundle
from ..errors import BundleError
from ..paths import as_path
from .extras import missing

try:
    import ray
except ImportError as error:
    raise missing("ray", "ray[data]") from error

FOLDER = "ray"  # in the cache folder of a node


@dataclass(frozen=True, slots=True)
class Shipped:
    """A bundle's files, each an object of Ray's store, by their path in the bundle.

    name is the bundle folder's, sha256 that of all its files. May be pickled within its cluster.
    """

    name: str
    sha256: str
    files: dict[str, Any]

    def unpack(self) -> Path:
        """The bundle's folder in this node's cache folder, written there if it is not yet.

        Raises:
            BundleError: it cannot be written.
        """
        # In the folder of its hash by its own name, which may stand for the model's.
        home = settings.cache_dir() / FOLDER / self.sha256
        folder = home / self.name
        try:
            home.parent.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(f"{home}.lock"):
                if not folder.is_dir():
                    home.mkdir(exist_ok=True)
                    self._write(folder)
        except OSError as error:
            raise BundleError(
                f"{folder}: {error.strerror or error}, wanted to write the bundle here; make room, "
                "or give this node a folder it can write as NPU_EMBED_CACHE."
            ) from error
        return folder

    def _write(self, folder: Path) -> None:
        """The files, under the folder's own name only when all are there."""
        with tempfile.TemporaryDirectory(dir=folder.parent) as partial:
            for name, content in self.files.items():
                path = Path(partial, self.name, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(memoryview(ray.get(content)))
            Path(partial, self.name).rename(folder)


def ship(bundle: str | Path) -> Shipped:
    """The bundle in the object store, for actors of any node; Ray must be initialized.

    The store holds it as long as something refers to what this returns.

    Raises:
        BundleError: it is no bundle, a file in it leads elsewhere or cannot be read.
        InputError, InputTypeError: it is no path.
    """
    root = as_path("bundle", bundle).resolve()
    Bundle.open(root).close()  # here, rather than on every node
    digest = hashlib.sha256()
    files = {}
    for path in sorted(root.rglob("*")):
        if path.is_dir():
            continue
        name = path.relative_to(root).as_posix()
        if not path.resolve().is_relative_to(root):
            raise BundleError(f"{path}: leads out of the bundle, wanted a file in it; copy it in.")
        if not path.is_file():  # a FIFO would be waited for
            raise BundleError(f"{path}: not a regular file, wanted one; remove it.")
        try:
            content = np.fromfile(path, dtype=np.uint8)  # read on the nodes without a copy
        except OSError as error:
            raise BundleError(f"{path}: {error.strerror or error}, wanted to read it.") from error
        digest.update(f"{name}\n{len(content)}\n".encode())
        digest.update(content.data)
        files[name] = ray.put(content)
    return Shipped(root.name, digest.hexdigest(), files)
