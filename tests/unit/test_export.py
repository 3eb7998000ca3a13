"""Checkpoint -> bundle, on a tiny BERT whose vectors Hugging Face computed."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from npu_embed.bf16 import round_f32, to_f32
from npu_embed.emulator import txn, xclbin
from npu_embed.errors import FetchError, InputError
from npu_embed.exporters import bert, export_checkpoint, exporter
from npu_embed.exporters.kernels import Gemm
from npu_embed.exporters.reference import BertReference, BertShape
from npu_embed.exporters.xclbins import gemm_xclbin, mha_xclbin
from npu_embed.manifest import Manifest, verify_sha256
from npu_embed.specs import Specs, check_words, parse_specs
from npu_embed.tensors import Tensors, open_tensors

DATA = Path(__file__).parent.parent / "data"
TINY, TINY_CLS = DATA / "tiny-bert", DATA / "tiny-bert-cls"

# Two float computations of a unit vector in different orders; Hugging Face's is in float32.
REFERENCE_TOLERANCE = 1e-5


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint, to be changed."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("references*"))
    return folder


@pytest.fixture
def few_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer streams, for tests that look at none of them."""
    monkeypatch.setattr(bert, "MAX_CHUNKS", 2)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint's bundle, only to be read."""
    return export_checkpoint(TINY, tmp_path_factory.mktemp("export") / "bundle")


@pytest.fixture(scope="module")
def manifest(bundle: Path) -> Manifest:
    return Manifest.read(bundle)


@pytest.fixture(scope="module")
def specs(manifest: Manifest) -> Specs:
    return parse_specs(manifest)


@pytest.fixture(scope="module")
def tensors(bundle: Path) -> Tensors:
    return open_tensors(bundle)


def unpack(packed: NDArray[np.uint8], k: int, n: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """(B, bias) of a packed weight with bias: blocks of 64 columns, 8 x 8 groups."""
    blocks = packed.reshape(-1, 256 + 128 * k)
    bias = blocks[:, :256].copy().view("<f4").reshape(-1)[:n]
    bits = blocks[:, 256:].copy().view("<u2").reshape(-1, k // 64, 8, 8, 8, 8)
    values = to_f32(np.ascontiguousarray(bits.transpose(1, 3, 5, 0, 2, 4)))
    return values.reshape(k, -1)[:, :n], bias


# --- the bundle ---------------------------------------------------------------------------------


def test_the_params_are_the_checkpoints_own(manifest: Manifest) -> None:
    config = json.loads((TINY / "config.json").read_text())
    for key in (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "vocab_size",
        "max_position_embeddings",
        "type_vocab_size",
        "pad_token_id",
    ):
        assert manifest.param_int(key) == config[key]
    assert manifest.param_float("layer_norm_eps") == config["layer_norm_eps"]
    wanted = {
        "name": "tiny-bert",
        "family": "bert",
        "target": "npu2",
        "hidden_act": "gelu",
        "pooling": "mean",
        "normalize": "1",
        "dim": "64",
        "max_tokens": "128",
        "max_rows": "2048",
        "no_window": "4294967295",
        "stages": "embeddings,layers,pooling,normalize",
    }
    assert wanted.items() <= manifest.params.items()
    assert "default_prompt" not in manifest.params


def test_every_file_but_the_manifest_has_its_hash(bundle: Path, manifest: Manifest) -> None:
    checks = list(verify_sha256(bundle, manifest))
    assert all(check.ok for check in checks)
    files = {str(p.relative_to(bundle)) for p in bundle.rglob("*") if p.is_file()}
    assert {check.file for check in checks} == files - {"manifest.txt"}


def test_the_specs_describe_four_gemms_and_the_buckets(specs: Specs) -> None:
    shapes = {g.key: (g.M, g.K, g.N, g.lda, g.c_stride) for g in specs.gemms.values()}
    assert shapes == {
        "qkv": (64, 64, 192, 64, 192),
        "o": (64, 64, 64, 64, 64),
        "up": (64, 64, 192, 64, 192),  # 160 columns, padded to whole tiles
        "down": (64, 192, 64, 192, 64),
    }
    assert all(g.max_rows == 2048 for g in specs.gemms.values())
    down = specs.gemms["down"]
    between = [(s.kernel_id, s.rows) for s in down.streams if s.rows % 64]
    assert between == [("down_r16", 16), ("down_r32", 32), ("down_r48", 48), ("down_r96", 96)]
    whole = [s.rows for s in down.streams if s.rows % 64 == 0]
    assert whole == list(range(64, 2049, 64))
    assert [(s.a_elems, s.c_elems) for s in down.streams] == [
        ((s.rows - 1) * 192 + 192, (s.rows - 1) * 64 + 64) for s in down.streams
    ]
    assert [m.rows for m in specs.mhas] == [16, 32, 48, 64, 80, 96, 112, 128]
    mha = specs.mhas[0]
    assert (mha.q_elems, mha.k_elems, mha.v_elems, mha.o_elems) == (
        15 * 192 + 64,
        15 * 192 + 128,
        15 * 192 + 192,
        15 * 64 + 64,
    )


def test_every_stream_decodes_and_runs_the_rows_its_record_says(bundle: Path, specs: Specs) -> None:
    for gemm in specs.gemms.values():
        for told in gemm.streams:
            stream = txn.decode((bundle / told.insts).read_bytes())
            rtp = [op.value for op in stream.ops[:6] if isinstance(op, txn.Write)]
            assert len(rtp) == 6
            assert rtp[0] * 4 * rtp[5] == told.rows
            assert rtp[0] == -(-told.rows // 64), "as many chunks as whole ones would take"
    for mha in specs.mhas:
        data = (bundle / mha.insts).read_bytes()
        check_words(mha, len(data) // 4)
        words = np.frombuffer(data, dtype="<u4")
        assert (words[list(mha.kv_words)] == mha.rows).all()
        assert (words[list(mha.win_words)] == 0xFFFFFFFF).all()


@pytest.mark.parametrize(("chunks", "rows"), [(1, [16, 32, 48]), (2, [16, 32, 48, 96])])
def test_rows_between_chunks_are_fewer_than_those_of_all_chunks(
    chunks: int, rows: list[int]
) -> None:
    made = Gemm("o", K=64, N=64, lda=64, c_stride=64).kernels(chunks, dev_gen=4)
    found = [r.field_int(1, "KEY ROWS") for r in made.records if r.tag == "gemm_rows"]
    assert found == rows
    assert len(made.files) == chunks + len(rows)


def test_views_hold_every_byte_their_stream_moves(bundle: Path, specs: Specs) -> None:
    for mha in specs.mhas:
        ends = dict.fromkeys(range(4), 0)
        bd: tuple[int, ...] = ()
        for op in txn.decode((bundle / mha.insts).read_bytes()).ops:
            if isinstance(op, txn.BlockWrite):
                bd = op.data
            if isinstance(op, txn.DdrPatch):
                d0, d1 = bd[3] >> 20, bd[4] >> 20 & 0x3FF
                last = (d0 - 1) + (d1 - 1) * ((bd[4] & 0xFFFFF) + 1)
                last += (bd[0] // (d0 * d1) - 1) * (bd[5] + 1)
                ends[op.arg_index] = max(ends[op.arg_index], op.arg_plus // 2 + 2 * last + 2)
        assert tuple(ends.values()) == (mha.q_elems, mha.k_elems, mha.v_elems, mha.o_elems)


def test_the_xclbins_are_the_two_programs(bundle: Path, manifest: Manifest) -> None:
    assert {key: x.kernel_name for key, x in manifest.xclbins.items()} == {
        "gemm": "MLIR_AIE",
        "mha": "MLIR_AIE",
    }
    for key, image in (("gemm", gemm_xclbin()), ("mha", mha_xclbin(4, 4, 16))):
        assert (bundle / manifest.xclbins[key].file).read_bytes() == image


def test_a_pdi_names_its_program_and_constants() -> None:
    parsed = xclbin.parse(mha_xclbin(6, 2, 32))
    assert parsed.partition is not None
    (pdi,) = parsed.partition.pdis
    assert parsed.partition.column_width == 4
    assert len(pdi.image) % 64 == 0
    assert pdi.image[:16] == bytes.fromhex("DD00000044332211") + b"NPUEMBED"
    form, length = struct.unpack_from("<II", pdi.image, 16)
    assert form == 1
    text = pdi.image[24 : 24 + length]
    assert not any(pdi.image[24 + length :])
    constants = json.loads(text)
    assert list(constants) == sorted(constants)
    assert constants == {
        "program": "mha",
        "columns": 4,
        "core_rows": 4,
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 32,
        "rtp_offset": 1024,
    }


def test_an_mha_of_uneven_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="5 heads, wanted a multiple of kv_heads 2"):
        mha_xclbin(5, 2, 32)


def test_packed_tensors_hold_the_linears_with_the_scale_in_q(tensors: Tensors) -> None:
    weights = load_file(TINY / "model.safetensors")
    for i in range(3):
        layer = f"encoder.layer.{i}"
        names = [f"{layer}.attention.self.{part}" for part in ("query", "key", "value")]
        matrix = np.concatenate([weights[f"{name}.weight"] for name in names]).T.copy()
        bias = np.concatenate([weights[f"{name}.bias"] for name in names])
        scale = np.float32(math.log2(math.e) / math.sqrt(16))
        matrix[:, :64] *= scale
        bias[:64] *= scale
        found, found_bias = unpack(tensors.u8(f"{layer}.qkv.packed"), 64, 192)
        np.testing.assert_array_equal(found, round_f32(matrix))
        np.testing.assert_array_equal(found_bias, bias)

        for key, name, k, n in (
            ("o", "attention.output.dense", 64, 64),
            ("up", "intermediate.dense", 64, 160),
            ("down", "output.dense", 192, 64),
        ):
            matrix = np.zeros((k, n), np.float32)
            weight = weights[f"{layer}.{name}.weight"].T
            matrix[: weight.shape[0]] = weight
            found, found_bias = unpack(tensors.u8(f"{layer}.{key}.packed"), k, n)
            np.testing.assert_array_equal(found, round_f32(matrix))
            np.testing.assert_array_equal(found_bias, weights[f"{layer}.{name}.bias"])


def test_host_tensors_are_the_checkpoints_own(tensors: Tensors) -> None:
    host = [
        name
        for name in load_file(TINY / "model.safetensors")
        if "LayerNorm" in name or name.startswith("embeddings.")
    ]
    for name, value in load_file(TINY / "model.safetensors").items():
        if name in host:
            np.testing.assert_array_equal(tensors.f32(name), value)
    packed = {f"encoder.layer.{i}.{k}.packed" for i in range(3) for k in ("qkv", "o", "up", "down")}
    trefs = {f"tref.{j}.{part}" for j in range(6) for part in ("ids", "hidden", "embedding")}
    assert set(tensors.names()) == {*host, *packed, *trefs}


def test_references_cover_a_word_nothing_other_scripts_and_the_limit(
    manifest: Manifest, tensors: Tensors
) -> None:
    records = manifest.tagged("tref")
    texts = [record.field_hex(2, "HEX") for record in records]
    assert [record.fields[:2] for record in records] == [(str(j), "-") for j in range(6)]
    assert "" in texts
    assert any(not text.isascii() for text in texts)
    lengths = [len(tensors.i32(f"tref.{j}.ids")) for j in range(6)]
    assert lengths[texts.index("")] == 2
    assert max(lengths) == 128
    for j, length in enumerate(lengths):
        assert tensors.shape(f"tref.{j}.hidden") == (4, length, 64)
        hidden = tensors.f32(f"tref.{j}.hidden")
        embedding = tensors.f32(f"tref.{j}.embedding", (64,))
        mean = hidden[-1].mean(axis=0)
        np.testing.assert_allclose(embedding, mean / np.linalg.norm(mean), atol=1e-6)


@pytest.mark.parametrize(("folder", "pooling"), [(TINY, "mean"), (TINY_CLS, "cls")])
def test_the_reference_forward_agrees_with_hugging_face(folder: Path, pooling: str) -> None:
    weights, wanted = (
        load_file(folder / "model.safetensors"),
        load_file(folder / "references.safetensors"),
    )
    shape = BertShape(3, 4, 1e-12, "gelu", pooling, True)
    model = BertReference(weights.__getitem__, shape)
    for i, embedding in enumerate(wanted["embeddings"]):
        found = model.forward(wanted[f"ids.{i}"])
        np.testing.assert_allclose(found.embedding, embedding, atol=REFERENCE_TOLERANCE)


def test_the_same_checkpoint_gives_the_same_bytes(bundle: Path, tmp_path: Path) -> None:
    again = export_checkpoint(TINY, tmp_path / "again")
    files = sorted(p.relative_to(bundle) for p in bundle.rglob("*") if p.is_file())
    assert files == sorted(p.relative_to(again) for p in again.rglob("*") if p.is_file())
    for file in files:
        assert (bundle / file).read_bytes() == (again / file).read_bytes(), file


@pytest.mark.usefixtures("few_chunks")
def test_progress_counts_every_stage_to_its_end(tmp_path: Path) -> None:
    seen: dict[str, tuple[int, int]] = {}

    def progress(stage: str, done: int, total: int) -> None:
        assert 0 <= done <= total
        assert seen.get(stage, (0, 0))[0] <= done
        seen[stage] = (done, total)

    export_checkpoint(TINY, tmp_path / "out", progress=progress)
    assert list(seen) == ["read", "pack", "references", "kernels", "write", "hash"]
    assert all(done == total for done, total in seen.values())


@pytest.mark.usefixtures("few_chunks")
def test_npu1_streams_name_their_generation(tmp_path: Path) -> None:
    out = export_checkpoint(TINY, tmp_path / "out", target="npu1", name="my model")
    manifest = Manifest.read(out)
    assert manifest.params["target"] == "npu1"
    assert manifest.params["name"] == "my model"
    assert txn.decode((out / "kernels/o_x1.insts.bin").read_bytes()).header.dev_gen == 3


# --- where the bundle goes ----------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    files = (p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def test_an_existing_place_is_kept_without_force(tmp_path: Path, bundle: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(bundle, out)
    with pytest.raises(InputError, match="out: exists, wanted a new folder"):
        export_checkpoint(TINY_CLS, out)
    assert contents(out) == contents(bundle)


@pytest.mark.usefixtures("few_chunks")
def test_force_replaces_a_bundle(tmp_path: Path, bundle: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(bundle, out)
    (out / "left over").touch()
    export_checkpoint(TINY_CLS, out, force=True)
    assert Manifest.read(out).params["pooling"] == "cls"
    assert not (out / "left over").exists()
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.usefixtures("few_chunks")
def test_force_fills_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    export_checkpoint(TINY, tmp_path / "out", force=True)
    assert Manifest.read(tmp_path / "out").params["pooling"] == "mean"


def make_folder(place: Path) -> None:
    place.mkdir()
    (place / "thesis.txt").write_text("mine")


def make_link(place: Path) -> None:
    place.with_name("elsewhere").mkdir()
    place.symlink_to(place.with_name("elsewhere"))


def make_file(place: Path) -> None:
    place.write_text("mine")


@pytest.mark.parametrize("make", [make_folder, make_link, make_file])
def test_force_never_deletes_what_is_no_bundle(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "out")
    before = contents(tmp_path)
    with pytest.raises(InputError, match="wanted a bundle to replace"):
        export_checkpoint(TINY, tmp_path / "out", force=True)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("place", [".", "out", "1_Pooling/deep", ".."])
def test_the_checkpoint_itself_is_never_written_to(checkpoint: Path, place: str) -> None:
    before = contents(checkpoint)
    (checkpoint / "1_Pooling").mkdir(exist_ok=True)
    with pytest.raises(InputError, match="in or around the checkpoint"):
        export_checkpoint(checkpoint, checkpoint / place, force=True)
    assert contents(checkpoint) == before


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.usefixtures("few_chunks")
def test_a_failure_leaves_everything_as_it_was(
    tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch, force: bool
) -> None:
    out = tmp_path / "out"
    if force:
        shutil.copytree(bundle, out)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporter, "write_safetensors", full)
    with pytest.raises(InputError, match="out: No space left on device, wanted to write"):
        export_checkpoint(TINY_CLS, out, force=force)
    assert os.listdir(tmp_path) == (["out"] if force else [])
    if force:
        assert contents(out) == contents(bundle)


@pytest.mark.usefixtures("few_chunks")
def test_the_old_bundle_comes_back_if_the_new_one_cannot_be_moved(
    tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    shutil.copytree(bundle, out)
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.suffix == ".new":
            raise OSError(13, "Permission denied")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(InputError, match="Permission denied"):
        export_checkpoint(TINY_CLS, out, force=True)
    assert os.listdir(tmp_path) == ["out"]
    assert contents(out) == contents(bundle)


@pytest.mark.usefixtures("few_chunks")
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "hash":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_checkpoint(TINY, tmp_path / "out", progress=interrupt)
    assert os.listdir(tmp_path) == []


def test_the_bundle_can_be_read_by_whom_the_umask_allows(bundle: Path) -> None:
    mask = os.umask(0)
    os.umask(mask)
    assert bundle.stat().st_mode & 0o777 == 0o777 & ~mask


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"checkpoint": "no/such/folder"}, "no/such/folder: no such folder, wanted a checkpoint"),
        ({"checkpoint": TINY / "config.json"}, "config.json: no such folder"),
        ({"target": "npu3"}, "target='npu3': unknown NPU, wanted 'npu2' or 'npu1'"),
        ({"out": "missing/out"}, "missing is no folder, wanted one"),
    ],
)
def test_arguments_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=words):
        export_checkpoint(**{"checkpoint": TINY, "out": tmp_path / "out", **arguments})


# --- the hub ------------------------------------------------------------------------------------


def fake_hub(monkeypatch: pytest.MonkeyPatch, download: Callable[..., object]) -> None:
    hub = types.ModuleType("huggingface_hub")
    hub.snapshot_download = download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)


@pytest.mark.usefixtures("few_chunks")
def test_a_hub_id_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[str]]] = []

    def download(repo_id: str, allow_patterns: list[str]) -> str:
        asked.append((repo_id, allow_patterns))
        return str(TINY)

    fake_hub(monkeypatch, download)
    out = export_checkpoint("org/tiny-bert", tmp_path / "out")
    assert Manifest.read(out).params["name"] == "org/tiny-bert"
    assert [repo_id for repo_id, _ in asked] == ["org/tiny-bert"]
    assert not any("bin" in pattern for pattern in asked[0][1])


def test_a_hub_id_without_the_library_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InputError, match=r"pip install 'npu-embed\[hub\]'"):
        export_checkpoint("org/tiny-bert", tmp_path / "out")


def test_a_hub_that_fails_is_a_fetch_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repo_id: str, allow_patterns: list[str]) -> str:
        raise RuntimeError("404 Client Error")

    fake_hub(monkeypatch, download)
    with pytest.raises(FetchError, match=r"org/tiny-bert: not fetched .*404 Client Error"):
        export_checkpoint("org/tiny-bert", tmp_path / "out")
