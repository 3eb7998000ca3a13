"""A copy of a bundle for larger packs and longer texts than it was exported for."""

from __future__ import annotations

import shutil
from pathlib import Path

from variants import link_or_copy

from npu_embed.exporters.descriptors import MAX_ITERATIONS
from npu_embed.exporters.geometry import Epilogue, M
from npu_embed.exporters.kernels import GEMM_CTX, TARGETS, Gemm, Kernels, Mha
from npu_embed.manifest import MANIFEST, Manifest, make_record, sha256_file, write_records
from npu_embed.records import Record, make_param
from npu_embed.specs import DEFAULT_MHA, parse_specs

# A stream repeats its descriptors once a chunk, and their field for that counts to 64.
MOST_ROWS = MAX_ITERATIONS * M
BUCKET_STEP = 64  # rows from one added attention bucket to the next
STREAM_TAGS = ("gemm", "gemm_chunks", "gemm_rows")


def stretched(source: Path, out: Path, *, max_rows: int, max_tokens: int) -> Path:
    """A copy of the bert bundle `source` whose packs have max_rows, whose texts max_tokens.

    Its GEMMs get streams for as many rows, attention gets the buckets that are missing; weights
    and vectors of shorter texts are the same. Neither limit is lowered. out must not exist. Gives
    out.

    Raises:
        ValueError: more rows than a stream can have, more tokens than the model has positions for,
            or a bundle of another family or layout.
    """
    manifest = Manifest.read(source)
    max_rows = max(max_rows, manifest.param_int("max_rows"))
    max_tokens = max(max_tokens, manifest.param_int("max_tokens"))
    _check(source, manifest, max_rows, max_tokens)
    shutil.copytree(source, out, copy_function=link_or_copy)
    dev_gen = TARGETS[manifest.param_str("target")]
    specs = parse_specs(manifest)
    files: dict[str, bytes] = {}
    records: list[Record] = []
    for record in manifest.records:
        if record.tag == "gemm":
            made = _gemm(record).kernels(max_rows // M, dev_gen)
            records.extend(made.records)
            files.update(made.files)
        elif record.tag == "param" and record.fields[0] == "max_rows":
            records.append(make_param("max_rows", max_rows))
        elif record.tag == "param" and record.fields[0] == "max_tokens":
            records.append(make_param("max_tokens", max_tokens))
        elif record.tag not in STREAM_TAGS:
            records.append(record)
            if record.tag == "mha" and int(record.fields[0]) == specs.mhas[-1].rows:
                strides = specs.gemms["qkv"].c_stride, specs.gemms["o"].lda
                more = _longer_buckets(record, max_tokens, strides, dev_gen)
                records.extend(more.records)
                files.update(more.files)
    for path, content in files.items():
        (out / path).unlink(missing_ok=True)  # it may be a link to the source's
        (out / path).write_bytes(content)
    records = [r for r in records if r.tag != "sha256" or r.fields[0] not in files]
    hashes = [make_record("sha256", path, sha256_file(out / path)) for path in files]
    (out / MANIFEST).unlink()
    (out / MANIFEST).write_text(write_records([*records, *hashes]), encoding="utf-8")
    return out


def _check(source: Path, manifest: Manifest, max_rows: int, max_tokens: int) -> None:
    family = manifest.param_str("family")
    if family != "bert":
        raise ValueError(
            f"{source}: a bundle of {family}, wanted one of bert; others keep their size"
        )
    positions = manifest.param_int("max_position_embeddings")
    if max_tokens > positions:
        raise ValueError(
            f"texts of {max_tokens} tokens, the model has positions for {positions}; ask for fewer"
        )
    if max_rows > MOST_ROWS or max_rows % M:
        raise ValueError(
            f"packs of {max_rows} rows, a stream takes multiples of {M} up to {MOST_ROWS}; ask for "
            "such a number"
        )


def _gemm(record: Record) -> Gemm:
    """The exporter's GEMM that a record describes."""
    if record.get("ctx") != GEMM_CTX:
        raise ValueError(f"{record.where}: context {record.get('ctx')}, wanted {GEMM_CTX}")
    return Gemm(
        record.fields[0],
        K=record.get_int("K"),
        N=record.get_int("N"),
        lda=record.get_int("lda"),
        c_stride=record.get_int("c_stride"),
        epilogue=Epilogue[record.get("epilogue").upper()],
        bias=bool(record.get_int("bias")),
    )


def _longer_buckets(
    record: Record, max_tokens: int, strides: tuple[int, int], dev_gen: int
) -> Kernels:
    """The buckets from the longest one, which the record describes, up to max_tokens."""
    mha = Mha(
        record.get_int("heads"),
        record.get_int("kv_heads"),
        record.get_int("head_dim"),
        qkv_stride=strides[0],
        o_stride=strides[1],
        name=record.get("name") if record.has("name") else DEFAULT_MHA,
    )
    longest, buckets = int(record.fields[0]), []
    while longest < max_tokens:
        longest += BUCKET_STEP
        buckets.append(longest)
    return mha.kernels(tuple(buckets), dev_gen)
