"""What is fuzzed: a function for each kind of file, which takes its bytes.

Each returns, whether the bytes were accepted or refused as they should be; anything else that is
raised is a finding.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
from fuzz import checkpoints
from guards import guarded_run
from handmade import pdi
from handmade_gemm import Tiles
from handmade_mha import Mha

from npu_embed import wordcheck
from npu_embed.bundle import Bundle
from npu_embed.embedder import Embedder
from npu_embed.emulator import array, program, txn, xclbin
from npu_embed.errors import BundleError, NpuEmbedError
from npu_embed.manifest import Manifest
from npu_embed.models.checks import buffer_sizes
from npu_embed.quantization import RANGES_FILE, bundle_ranges
from npu_embed.specs import MhaSpec, check_words, parse_specs
from npu_embed.streamcheck import moves
from npu_embed.tensors import SAFETENSORS, TENSORS_BIN, TENSORS_TXT, Tensors, open_tensors
from npu_embed.tokenizer import Tokenizer

NO_WINDOW = 0xFFFFFFFF
TENSOR_BYTES = 4096  # of the tensors.bin beside a fuzzed tensors.txt
MAX_ELEMS = 1 << 18  # of a fuzzed run, so that an input takes milliseconds

# Sizes that are left to numpy, and wide ones that machine code takes.
TILES, WIDE_TILES = Tiles(), Tiles(k_tile=32, n_tile=64)
MHA = Mha(heads=4, kv_heads=2, head_dim=8, rows=8, shares=((0, 2), (2, 2)))
WIDE_MHA = replace(MHA, head_dim=16)
ARGUMENT_BYTES = (4096, 8192, 4096, 4096)


# What the shortest run of a small bundle reads, and how much of each is fuzzed.
EMBED_FILES = (
    "manifest.txt",
    "tensors.safetensors",
    "tokenizer.json",
    "kernels/gemm.xclbin",
    "kernels/mha.xclbin",
    *(f"kernels/{key}_r16.insts.bin" for key in ("qkv", "o", "up", "down")),
    "kernels/mha_16.insts.bin",
)
EMBED_BYTES = 8192


@cache
def _folder() -> Path:
    """A folder of this process, in memory where there is such a place."""
    place = Path("/dev/shm")
    held = tempfile.TemporaryDirectory(dir=place if os.access(place, os.W_OK) else None)
    _held.append(held)
    return Path(held.name)


_held: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends


def _use(tensors: Tensors) -> None:
    """Ask for every tensor as the models do."""
    for name in tensors.names():
        tensors.raw(name)
        tensors.shape(name)
        for reader in (tensors.f32, tensors.bf16, tensors.i32, tensors.f16):
            with contextlib.suppress(BundleError):
                reader(name)
    tensors.close()


def check_named(folder: Path, error: BundleError) -> None:
    """A refusal names a file of the bundle."""
    names = {path.name for path in folder.rglob("*")}
    assert any(name in str(error) for name in names), f"names no file: {error}"


def manifest(data: bytes) -> None:
    """A manifest, and the specs in it."""
    with contextlib.suppress(BundleError):
        parsed = Manifest.parse(data)
        specs = parse_specs(parsed)
        for mha in specs.all_mhas:
            with contextlib.suppress(BundleError):
                check_words(mha, 1024)
        for name in parsed.params:
            for reader in (parsed.param_int, parsed.param_float, parsed.param_ints):
                with contextlib.suppress(BundleError):
                    reader(name)
        buffer_sizes(parsed, [(gemm.max_rows, gemm.lda) for gemm in specs.all_gemms])


def tensors_txt(data: bytes) -> None:
    """The table of tensors of the published layout."""
    folder = _folder() / "txt"
    if not folder.exists():
        folder.mkdir()
        (folder / TENSORS_BIN).write_bytes(bytes(TENSOR_BYTES))
    (folder / TENSORS_TXT).write_bytes(data)
    with contextlib.suppress(BundleError):
        _use(open_tensors(folder))


def safetensors(data: bytes) -> None:
    """A safetensors file."""
    folder = _folder() / "safetensors"
    folder.mkdir(exist_ok=True)
    (folder / SAFETENSORS).write_bytes(data)
    with contextlib.suppress(BundleError):
        _use(open_tensors(folder))


def xclbins(data: bytes) -> None:
    """An xclbin, and the array programs it names."""
    with contextlib.suppress(xclbin.XclbinError):
        parsed = xclbin.parse(data)
        for found in parsed.partition.pdis if parsed.partition is not None else ():
            with contextlib.suppress(program.NoArrayProgram):
                array.load_program(found.image, 8)


def streams(data: bytes) -> None:
    """An instruction stream of any form, decoded, printed and looked through."""
    readers: list[Callable[[bytes], object]] = [txn.read_insts, txn.decode_legacy, txn.is_legacy]
    for reader in readers:
        with contextlib.suppress(txn.TxnError):
            found = reader(data)
            if isinstance(found, txn.LegacyStream):
                list(txn.disassemble(found))
    with contextlib.suppress(txn.TxnError):
        decoded = txn.decode(data)
        assert decoded.encode() == data
        assert sum(1 for _ in txn.disassemble(decoded)) == len(decoded.ops)
        moves(decoded)
        for mha in _mha_specs():
            wordcheck.find_problem(mha, decoded, NO_WINDOW)


@cache
def _mha_specs() -> tuple[MhaSpec, ...]:
    text = (
        "version 1\nxclbin mha mha.xclbin MLIR_AIE\nmha 8 ctx=mha insts=a q_elems=1 k_elems=1 "
        "v_elems=1 o_elems=1 kv_words=1,8,14,20 win_words=26,32,38\n"
    )
    return parse_specs(Manifest.parse(text)).all_mhas


def runs(data: bytes) -> None:
    """An instruction stream run on the emulated array, with guards around its arguments.

    By numpy and, where llvmlite is installed and NPU_EMBED_COMPILED does not forbid it, in machine
    code, which checks no bounds: programs of both sizes take the stream.
    """
    program.MAX_ELEMS = MAX_ELEMS
    nans = sum(data) % 2 == 1  # for every other input
    common = {"columns": 3, "core_rows": 2, "rtp_offset": 1024}
    for tiles in (TILES, WIDE_TILES):
        gemm = {"rows_per_core": tiles.rows_per_core, "k_tile": tiles.k_tile}
        image = pdi(program="gemm", **common, **gemm, n_tile=tiles.n_tile)
        guarded_run(image, 3, data, ARGUMENT_BYTES, nans)
    for mha in (MHA, WIDE_MHA):
        heads = {"heads": mha.heads, "kv_heads": mha.kv_heads, "head_dim": mha.head_dim}
        image = pdi(program="mha", **common, **heads)
        guarded_run(image, 3, data, ARGUMENT_BYTES, nans)


def tokenizer(data: bytes) -> None:
    """A tokenizer.json, and a text read with it."""
    path = _folder() / "tokenizer.json"
    path.write_bytes(data)
    with contextlib.suppress(BundleError):
        opened = Tokenizer.from_file(path, max_tokens=16)
        opened.encode_batch(["a text", "[CLS] x\0\n", "\N{SNOWMAN}" * 40], prompt="query: ")


def ranges(data: bytes) -> None:
    """The ranges of int8 vectors stored in a bundle."""
    folder = _folder() / "ranges"
    folder.mkdir(exist_ok=True)
    (folder / RANGES_FILE).write_bytes(data)
    with contextlib.suppress(BundleError):
        bundle_ranges(folder)


def bundles(data: bytes) -> None:
    """A bundle with such a manifest: opened, and all its streams decoded and checked."""
    folder = _folder() / "bundle"
    if not folder.exists():
        from fuzz.seeds import small_bundle

        small_bundle(folder)
    (folder / "manifest.txt").write_bytes(data)
    with contextlib.suppress(BundleError):
        opened = Bundle.open(folder)
        for gemm in opened.specs.all_gemms:
            for stream in gemm.streams:
                with contextlib.suppress(BundleError):
                    opened.stream(gemm, stream.insts)
        for mha in opened.specs.all_mhas:
            with contextlib.suppress(BundleError):
                opened.stream(mha, mha.insts)
        opened.close()


def embed(data: bytes) -> None:
    """A bundle that embeds a text, one of its files changed: which one, and its beginning."""
    folder = _folder() / "embed"
    if not folder.exists():
        from fuzz.seeds import small_bundle

        small_bundle(folder)
    path = folder / EMBED_FILES[data[0] % len(EMBED_FILES) if data else 0]
    content = path.read_bytes()
    path.write_bytes(data[1:] + content[EMBED_BYTES:])
    try:
        with Embedder(folder, device="emulated") as embedder:
            vector = embedder.embed("two cats")
        assert np.isfinite(vector).all()
    except BundleError as error:
        check_named(folder, error)
    except NpuEmbedError:
        pass
    finally:
        path.write_bytes(content)


def checkpoint(data: bytes) -> None:
    """A checkpoint to export, one of its files changed: which one, and its bytes."""
    folder = _folder() / "checkpoint"
    folder.mkdir(exist_ok=True)
    checkpoints.export(folder, data)


TARGETS: dict[str, Callable[[bytes], None]] = {
    "manifest": manifest,
    "tensors_txt": tensors_txt,
    "safetensors": safetensors,
    "xclbin": xclbins,
    "txn": streams,
    "runs": runs,
    "tokenizer": tokenizer,
    "ranges": ranges,
    "bundle": bundles,
    "embed": embed,
    "checkpoint": checkpoint,
}
