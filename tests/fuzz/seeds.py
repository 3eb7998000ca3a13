"""The seeds of each target, made of a tiny bundle: `python -m fuzz.seeds` writes them anew."""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
from fuzz import checkpoints
from fuzz.targets import (
    EMBED_BYTES,
    EMBED_FILES,
    MHA,
    TARGETS,
    TENSOR_BYTES,
    WIDE_MHA,
    WIDE_TILES,
)
from handmade import assemble
from handmade_gemm import Gemm, Tiles

from npu_embed.exporters import export_checkpoint
from npu_embed.tensors import write_safetensors
from npu_embed.tensors_txt import write_tensors_txt

SEEDS = Path(__file__).with_name("seeds")
DATA = Path(__file__).parent.parent / "data"
LEFT_OUT = ("tref", "sha256")
TOKENIZERS = ("tiny-bert", "tiny-roberta", "tiny-gemma3", "tiny-xlm-roberta")

# Version 1.0, as aiebu writes it, and the form older than TXN.
_V1_0 = (
    *(0x06040001, 0x00000101, 2, 40, 0x01000000, 0x1D214, 0x00000002),
    *(0x03000000, 0, 0x10000),
)
_LEGACY = (
    *(0x00000011, 0x01000405, 0x01000100, 0x0B590100, 0x000055FF, 0x00000001, 0x00000010),
    *(0x314E5A5F, 0x635F5F31, 0x676E696C, 0x39354E5F, 0x6E693131, 0x5F727473, 0x64726F77),
    *(0x00004573, 0x07BD9630, 0x000055FF),
    *(0x060304A6, 0, 1, 2, 0, 0x00600005, 0x80800007, 9, 0x2CD0000C, 0x2E107041),
    *(0x02030400, 0x0001D204, 0x42),
)


def small_bundle(folder: Path) -> None:
    """A tiny BERT's bundle."""
    export_checkpoint(DATA / "tiny-bert", folder, name="seed")


def _short(manifest: str) -> str:
    """The manifest with one gemm_chunks record a gemm, no hashes and no references."""
    kept: list[str] = []
    for line in manifest.splitlines():
        tag, first = line.split()[:2]
        again = any(other.startswith(f"gemm_chunks {first} ") for other in kept)
        if tag not in LEFT_OUT and not (tag == "gemm_chunks" and again):
            kept.append(line.replace("max_rows 2048", "max_rows 128"))
    return "\n".join(kept) + "\n"


def _tokenizers() -> dict[str, bytes]:
    """Tokenizer files of each kind, with the first words of their vocabularies."""
    texts = {model: (DATA / model / "tokenizer.json").read_text("utf-8") for model in TOKENIZERS}
    return {model: checkpoints.small_tokenizer(text).encode() for model, text in texts.items()}


def _tensors() -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]]:
    return {
        "a": np.zeros((2, 3), np.float32),
        "b": np.zeros(5, np.uint8),
        "c": np.ones((4, 2), np.uint16),
        "d": np.ones(3, np.int32),
    }


def _npy(array: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> bytes:
    held = io.BytesIO()
    np.save(held, array)
    return held.getvalue()


def make(folder: Path) -> dict[str, dict[str, bytes]]:
    """Seeds by target and name, by way of files in a folder."""
    bundle = folder / "bundle"
    small_bundle(bundle)
    manifest = (bundle / "manifest.txt").read_text(encoding="utf-8")
    kernels = {name: (bundle / f"kernels/{name}").read_bytes() for name in (
        "gemm.xclbin", "mha.xclbin", "qkv_x2.insts.bin", "up_r16.insts.bin", "mha_16.insts.bin",
    )}  # fmt: skip
    published = folder / "published"
    export_checkpoint(DATA / "tiny-eg2", published, name="seed", layout="published")
    write_safetensors(folder / "t.safetensors", _tensors(), bf16=["c"])
    write_tensors_txt(folder, _tensors(), bf16=["c"])
    assert (folder / "tensors.bin").stat().st_size <= TENSOR_BYTES
    streams = {name: kernels[name] for name in kernels if name.endswith("insts.bin")}
    gemms = {
        "plain": Gemm(Tiles(), 2, 1, (1, 2), epilogue=1),
        "gap": Gemm(Tiles(), 1, 2, (1, 1), epilogue=3, lda=40, c_stride=24),
        "ragged": Gemm(Tiles(), 1, 1, (1,), bias=False, ragged=True),
        "wide": Gemm(WIDE_TILES, 1, 1, (1,), epilogue=3, lda=40, c_stride=96),
    }
    return {
        "manifest": {
            "own": _short(manifest).encode(),
            "published": _short((published / "manifest.txt").read_text("utf-8")).encode(),
        },
        "tensors_txt": {"small": (folder / "tensors.txt").read_bytes()},
        "safetensors": {"small": (folder / "t.safetensors").read_bytes()},
        "xclbin": {name: kernels[name] for name in ("gemm.xclbin", "mha.xclbin")},
        "txn": {
            **streams,
            "v1_0": np.array(_V1_0, "<u4").tobytes(),
            "legacy": np.array(_LEGACY, "<u4").tobytes(),
            "text": b"\n".join(f"{word:08X}".encode() for word in _V1_0),
        },
        "runs": {
            **{f"gemm_{name}": assemble(gemm.ops()) for name, gemm in gemms.items()},
            "mha": assemble(MHA.ops()),
            "mha_wide": assemble(WIDE_MHA.ops()),
        },
        "tokenizer": _tokenizers(),
        "ranges": {"small": _npy(np.array([[-1, 0, 0.5], [1, 2, 3]], np.float32))},
        "bundle": {"own": _short(manifest).encode()},
        "embed": {
            Path(file).name: bytes([i]) + (bundle / file).read_bytes()[:EMBED_BYTES]
            for i, file in enumerate(EMBED_FILES)
        },
        "checkpoint": checkpoints.seeds(folder),
    }


def main() -> None:
    """Write all seeds."""
    with tempfile.TemporaryDirectory() as place:
        made = make(Path(place))
    assert made.keys() == TARGETS.keys()
    shutil.rmtree(SEEDS, ignore_errors=True)
    for target, seeds in made.items():
        (SEEDS / target).mkdir(parents=True)
        for name, content in seeds.items():
            (SEEDS / target / name).write_bytes(content)
    sys.stdout.write(f"{sum(map(len, made.values()))} seeds\n")


if __name__ == "__main__":
    main()
