"""The engines to compare with: their environment in benchmarks/.venv, and their models' files.

Everything here is made once and kept: the environment by pip at pinned versions, graphs, the full-
size checkpoint and its bundle under benchmarks/results. What cannot be made is a reason, not an
error: the peer is left out and the reason printed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

import make_full_checkpoint
import report

import npu_embed
from npu_embed.exporters import EXPORTER_VERSION

HERE = Path(__file__).resolve().parent
PEER_VENV = HERE / ".venv"
RESULTS = HERE / "results"
EXPORT_ONNX = HERE / "export_onnx.py"

# Pinned: a peer must not change between two measurements. In the order they are installed.
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "sentence-transformers": (
        "torch==2.13.0",
        "transformers==5.24.0",
        "sentence-transformers==6.2.0",
    ),
    "onnxruntime": ("onnxruntime==1.32.0", "onnx==1.23.2", "onnxscript==0.7.2"),
    "egemma2": ("egemma2==0.3.2",),
}


class Unavailable(Exception):
    """Something a peer needs cannot be made; the message is the reason."""


def peer_python(folder: Path = PEER_VENV, packages: Mapping[str, Sequence[str]] = PACKAGES) -> Path:
    """The Python of the peers' environment, with every group of packages that pip can install.

    A group that is there at these versions is not touched, one that failed is tried again: its
    engines then say themselves what they miss.
    """
    python = folder / "bin" / "python"
    done = folder / "installed.txt"  # a group is added once it is whole
    listed = done.read_text(encoding="utf-8").split() if done.is_file() else []
    there = set(listed) if python.exists() else set()
    missing = [group for group in packages.values() if not set(group) <= there]
    if not missing:
        return python
    if not python.exists():
        venv.create(folder, with_pip=True, symlinks=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for group in missing:
        sys.stderr.write(f"installing {', '.join(group)} into {folder}\n")
        # pip's own output must not get between the JSON lines.
        if subprocess.run([*pip, *group], stdout=sys.stderr).returncode:
            sys.stderr.write(f"pip could not install {', '.join(group)} into {folder}.\n")
            continue
        there |= set(group)
        done.write_text("".join(f"{package}\n" for package in sorted(there)), encoding="utf-8")
    return python


def onnx_graphs(checkpoint: Path, python: Path, results: Path = RESULTS) -> Path:
    """The folder of export_onnx.py's graphs of a checkpoint, made now if it is not there.

    Raises:
        Unavailable: the export failed.
    """
    weights = checkpoint / "model.safetensors"
    if not weights.is_file():
        raise Unavailable(f"{weights}: no such file, wanted the checkpoint's weights")
    stat = weights.stat()
    key = repr((str(weights.resolve()), stat.st_size, stat.st_mtime_ns, PACKAGES["onnxruntime"]))
    out = results / f"onnx-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    if out.is_dir():
        return out
    report.progress("exporting the checkpoint to ONNX")
    return _made(out, [str(python), str(EXPORT_ONNX), str(checkpoint)])


def full_checkpoint(results: Path = RESULTS) -> Path:
    """make_full_checkpoint's folder, made now if it is not there."""
    out = results / f"embedding-gemma2-{make_full_checkpoint.fingerprint()}"
    if not out.is_dir():
        report.progress("making a full-size checkpoint of random weights")
        make_full_checkpoint.make(out)
    return out


def full_bundle(checkpoint: Path) -> Path:
    """The checkpoint's bundle, by a process of its own: this one stays small.

    Raises:
        Unavailable: the export failed.
    """
    out = checkpoint.with_name(f"{checkpoint.name}-bundle-{EXPORTER_VERSION}")
    if out.is_dir():
        return out
    report.progress("exporting the full-size checkpoint to a bundle")
    return _made(out, [sys.executable, "-m", "npu_embed", "export", str(checkpoint)])


def _made(out: Path, command: Sequence[str]) -> Path:
    """`out`, which the command, called with a folder beside it, has filled."""
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f".{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    imported_from = str(Path(npu_embed.__file__).parents[1])
    paths = [imported_from, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **report.plain_environment(),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    done = subprocess.run(
        [*command, str(part)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        env=environment,
    )
    if done.returncode:
        words = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise Unavailable(words[-1] if words else f"{command[1]} ended with {done.returncode}")
    part.rename(out)
    return out
