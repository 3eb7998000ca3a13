"""Bundles with more hardware contexts than they were exported with."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

from npu_embed.manifest import (
    MANIFEST,
    Manifest,
    Record,
    bundle_path,
    make_record,
    sha256_file,
    write_records,
)
from npu_embed.specs import parse_specs


def one_context_a_gemm(source: Path, out: Path) -> Path:
    """A copy of the bundle `source` in which each GEMM key has an xclbin file of its own.

    The kernels are the same, under names of their own, so that the vectors are too. out must not
    exist. Gives out.
    """
    manifest = Manifest.read(source)
    specs = parse_specs(manifest)
    shutil.copytree(source, out, copy_function=link_or_copy)
    records: list[Record] = []
    hashes: list[Record] = []
    for key, gemm in specs.gemms.items():
        old = manifest.xclbins[gemm.ctx]
        file = Path(old.file)
        new = file.with_name(f"{file.stem}-{key}{file.suffix}").as_posix()
        original = bundle_path(source, old.file, f"{MANIFEST}:{old.line}")
        shutil.copyfile(original, out / new)
        records.append(make_record("xclbin", _key(key), new, old.kernel_name))
        hashes.append(make_record("sha256", new, sha256_file(original)))
    still_used = {mha.ctx for mha in specs.all_mhas}
    for record in manifest.records:
        if record.tag == "xclbin" and record.fields[0] not in still_used:
            continue
        records.append(_moved(record) if record.tag == "gemm" else record)
    (out / MANIFEST).unlink()  # it may be a link to the source's
    (out / MANIFEST).write_text(write_records([*records, *hashes]), encoding="utf-8")
    return out


def _key(gemm: str) -> str:
    return f"gemm-{gemm}"


def _moved(record: Record) -> Record:
    """A gemm record, its context the one of its key."""
    ctx = f"ctx={_key(record.fields[0])}"
    fields = tuple(ctx if field.startswith("ctx=") else field for field in record.fields)
    return replace(record, fields=fields, text="")


def link_or_copy(source: str, target: str) -> None:
    """A hard link where the file system has them: weights take no room twice."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
