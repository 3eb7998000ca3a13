"""Opening a bundle: what can be checked without running it is checked, by file and line."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from npu_embed import models
from npu_embed.bundle import Bundle
from npu_embed.device import Session
from npu_embed.emulator import txn
from npu_embed.errors import BundleError, InputError
from npu_embed.models import Forward, checks
from npu_embed.packing import make_packs
from npu_embed.tensors import SAFETENSORS, open_tensors, write_safetensors
from npu_embed.trace import Timing

Change = Callable[[Path], None]


def replaced(old: str, new: str) -> Change:
    """Change a manifest that must contain `old`."""

    def change(bundle: Path) -> None:
        manifest = bundle / "manifest.txt"
        text = manifest.read_text()
        assert old in text
        manifest.write_text(text.replace(old, new))

    return change


def written(file: str, content: bytes) -> Change:
    def change(bundle: Path) -> None:
        (bundle / file).write_bytes(content)

    return change


def removed(file: str) -> Change:
    return lambda bundle: (bundle / file).unlink()


def _folder_for_file(bundle: Path) -> None:
    (bundle / "kernels/gemm.xclbin").unlink()
    (bundle / "kernels/gemm.xclbin").mkdir()


def _link_out(bundle: Path) -> None:
    (bundle / "kernels/gemm.xclbin").rename(bundle.parent / "outside")
    (bundle / "kernels/gemm.xclbin").symlink_to(bundle.parent / "outside")


def _fifo(bundle: Path) -> None:
    (bundle / "kernels/qkv_x1.insts.bin").unlink()
    os.mkfifo(bundle / "kernels/qkv_x1.insts.bin")


def test_a_bundle_says_what_it_is(tiny_bundle: Path) -> None:
    bundle = Bundle.open(tiny_bundle)
    assert (bundle.name, bundle.family, bundle.target) == ("tiny-bert", "bert", "npu2")
    assert (bundle.max_tokens, bundle.max_rows, bundle.no_window) == (128, 2048, 0xFFFFFFFF)
    assert bundle.has_array_programs
    assert bundle.prompts == {}
    bundle.close()


def test_a_str_is_a_path_too(tiny_bundle: Path) -> None:
    assert Bundle.open(str(tiny_bundle)).path == tiny_bundle


def test_what_is_no_folder_is_told_how_to_be_made(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", Path(__file__)):
        with pytest.raises(BundleError, match=r"no such folder.*npu-embed export"):
            Bundle.open(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (removed("manifest.txt"), r"manifest.txt"),
        (removed(SAFETENSORS), r"tensors"),
        (removed("kernels/gemm.xclbin"), r"manifest.txt:\d+: 'kernels/gemm.xclbin': no such file"),
        (removed("kernels/o_x32.insts.bin"), r"manifest.txt:\d+: .*no such file"),
        (removed("kernels/o_r48.insts.bin"), r"manifest.txt:\d+: .*o_r48.insts.bin.*no such file"),
        (_folder_for_file, r"not a regular file"),
        (_fifo, r"not a regular file"),
        (_link_out, r"a link that leads out of the bundle"),
        (replaced("kernels/gemm.xclbin MLIR", "../outside MLIR"), r"a path with `..`"),
        (replaced("kernels/gemm.xclbin MLIR", "/etc/passwd MLIR"), r"an absolute path"),
        (written("kernels/o_x1.insts.bin", b""), r"o_x1.insts.bin has 0 bytes"),
        (written("kernels/o_x1.insts.bin", bytes(18)), r"o_x1.insts.bin has 18 bytes"),
        (written("kernels/o_r96.insts.bin", bytes(18)), r"o_r96.insts.bin has 18 bytes"),
        (written("kernels/mha_16.insts.bin", bytes(64)), r"mha 16 kv_words has word \d+"),
        (replaced("param target npu2", "param target npu7"), r"target npu7, wanted npu1 or npu2"),
        (
            replaced("param max_rows 2048", "param max_rows 4096"),
            r"gemm \w+ runs at most 2048 rows",
        ),
        (replaced("param max_rows 2048", "param max_rows 0"), r"max_rows"),
        (replaced("param max_tokens 128", "param max_tokens many"), r"max_tokens"),
        (replaced("param family bert\n", ""), r"family"),
        (replaced("version 1\n", "version 2\n"), r"version 2, this runtime reads 1"),
    ],
)
def test_a_bad_bundle_is_refused_at_open(tiny_copy: Path, change: Change, words: str) -> None:
    change(tiny_copy)
    with pytest.raises(BundleError, match=words):
        Bundle.open(tiny_copy)


def test_unknown_records_are_skipped(tiny_copy: Path) -> None:
    replaced("version 1\n", "version 1\nfuture 1 2 3 a=b\n")(tiny_copy)
    assert Bundle.open(tiny_copy).name == "tiny-bert"


@pytest.mark.parametrize("change", [removed("tokenizer.json"), written("tokenizer.json", b"{}")])
def test_a_missing_or_damaged_tokenizer_is_a_bundle_error(tiny_copy: Path, change: Change) -> None:
    change(tiny_copy)
    with pytest.raises(BundleError, match=r"tokenizer.json"):
        Bundle.open(tiny_copy).open_tokenizer()


def test_a_file_that_vanishes_after_opening_is_a_bundle_error(tiny_copy: Path) -> None:
    bundle = Bundle.open(tiny_copy)
    shutil.rmtree(tiny_copy / "kernels")
    gemm = bundle.specs.gemms["qkv"]
    with pytest.raises(BundleError, match=r"no such file"):
        bundle.stream(gemm, gemm.streams[0].insts)
    with pytest.raises(BundleError, match=r"no such file"):
        bundle.xclbin("gemm")


def test_a_stream_is_read_once(tiny_copy: Path) -> None:
    bundle = Bundle.open(tiny_copy)
    gemm = bundle.specs.gemms["qkv"]
    file = gemm.streams[0].insts
    first = bundle.stream(gemm, file)
    (tiny_copy / file).unlink()
    assert bundle.stream(gemm, file) is first
    assert txn.decode(first).header.dev_gen == 4


# --- prompts ------------------------------------------------------------------------------------


@pytest.fixture
def prompted(tiny_copy: Path) -> Bundle:
    text = (
        f"prompt query {b'query: '.hex()}\nprompt document {b'passage: '.hex()}\nprompt empty -\n"
    )
    replaced("version 1\n", f"version 1\n{text}")(tiny_copy)
    return Bundle.open(tiny_copy)


def test_prompts_are_known_by_name(prompted: Bundle) -> None:
    assert prompted.prompt("query") == "query: "
    assert prompted.prompt("document") == "passage: "
    assert prompted.prompt("empty") == ""
    assert prompted.prompt(None) == ""


def test_the_default_prompt_is_the_manifests(prompted: Bundle) -> None:
    prompted.manifest.params["default_prompt"] = "query"  # type: ignore[index]
    assert prompted.prompt(None) == "query: "


@pytest.mark.parametrize("name", ["Query", "", "query ", 3])
def test_an_unknown_prompt_is_refused_with_the_known_ones(prompted: Bundle, name: str) -> None:
    with pytest.raises(
        InputError, match=r"unknown prompt, this bundle has: document, empty, query"
    ):
        prompted.prompt(name)


def test_without_prompts_the_error_says_so(tiny_bundle: Path) -> None:
    with pytest.raises(InputError, match=r"this bundle has: none"):
        Bundle.open(tiny_bundle).prompt("query")


# --- what a family needs ------------------------------------------------------------------------


def load(path: Path) -> Forward:
    bundle = Bundle.open(path)
    return models.load(Session.open("emulated"), bundle, bundle.max_rows)


def _drop_records(tag: str) -> Change:
    def change(bundle: Path) -> None:
        manifest = bundle / "manifest.txt"
        lines = manifest.read_text().splitlines(keepends=True)
        manifest.write_text("".join(line for line in lines if not line.startswith(tag)))

    return change


def _tensor(name: str, change: Callable[[np.ndarray], np.ndarray] | None) -> Change:
    """Replace one tensor of the bundle; None leaves it out."""

    def changed(bundle: Path) -> None:
        opened = open_tensors(bundle)
        dtypes = {"f32": np.float32, "i32": np.int32, "u8": np.uint8}
        arrays = {
            n: opened.raw(n).view(dtypes[opened.dtype(n)]).reshape(opened.shape(n)).copy()
            for n in opened.names()
        }
        if change is None:
            del arrays[name]
        else:
            arrays[name] = change(arrays[name])
        write_safetensors(bundle / SAFETENSORS, arrays)

    return changed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            replaced("param family bert", "param family llama"),
            r"family llama, this version runs bert",
        ),
        (
            replaced("param pooling mean", "param pooling last"),
            r"pooling last, wanted mean, max, cls",
        ),
        (replaced("pooling,normalize", "pooling,dense,normalize"), r"not the same: dense"),
        (replaced("pooling,normalize", "pooling"), r"not the same: normalize"),
        (replaced("layers,pooling", "pooling,layers"), r"not the same: their order"),
        (replaced("param normalize 1", "param normalize 0"), r"not the same: normalize"),
        (_drop_records("mha"), r"no mha record"),
        (
            replaced("param hidden_size 64", "param hidden_size 65"),
            r"qkv N is 192, wanted at least 195",
        ),
        (replaced("param hidden_size 64", "param hidden_size 60"), r"shape|wanted"),
        (
            replaced("param max_tokens 128", "param max_tokens 256"),
            r"longest mha bucket has 128 rows",
        ),
        (
            replaced("param layer_norm_eps 1e-12", "param layer_norm_eps 1e300"),
            r"layer_norm_eps is 1e\+300, wanted a number below 1",
        ),
        (replaced("param layer_norm_eps 1e-12", "param layer_norm_eps 0"), r"a number above 0"),
        (replaced("c_stride=64 a_elems=4096", "c_stride=66 a_elems=4096"), r"c_elems"),
        (_tensor("embeddings.LayerNorm.weight", None), r"embeddings.LayerNorm.weight missing"),
        (_tensor("encoder.layer.1.up.packed", None), r"encoder.layer.1.up.packed missing"),
        (_tensor("embeddings.LayerNorm.bias", lambda a: a[:-1]), r"embeddings.LayerNorm.bias"),
        (_tensor("embeddings.word_embeddings.weight", lambda a: a[:-1]), r"word_embeddings"),
    ],
)
def test_a_bundle_that_lacks_what_its_family_needs_is_refused(
    tiny_copy: Path, change: Change, words: str
) -> None:
    change(tiny_copy)
    with pytest.raises(BundleError, match=words):
        load(tiny_copy)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("a_elems=4096 c_elems=12288", "a_elems=9999 c_elems=12288", r"gemm qkv a_elems is 9999"),
        ("a_elems=4096 c_elems=12288", "a_elems=4096 c_elems=99999", r"gemm qkv c_elems is 99999"),
        ("a_elems=1024 c_elems=3072", "a_elems=1089 c_elems=3072", r"gemm qkv a_elems is 1089"),
        ("a_elems=1024 c_elems=3072", "a_elems=1024 c_elems=3265", r"gemm qkv c_elems is 3265"),
        (" o_elems=", " o_elems=9", r"mha \d+ o_elems is 9\d+, wanted at most"),
        (" q_elems=", " q_elems=9", r"mha \d+ q_elems is 9\d+, wanted at most"),
        (" k_elems=", " k_elems=9", r"mha \d+ k_elems is 9\d+, wanted at most"),
        (" v_elems=", " v_elems=9", r"mha \d+ v_elems is 9\d+, wanted at most"),
    ],
)
def test_a_view_longer_than_its_rows_is_refused_before_it_is_bound(
    tiny_copy: Path, old: str, new: str, words: str
) -> None:
    replaced(old, new)(tiny_copy)
    with pytest.raises(BundleError, match=rf"manifest.txt:\d+: {words}"):
        load(tiny_copy)


def test_row_buffers_beyond_reason_are_refused_before_they_are_allocated(tiny_copy: Path) -> None:
    manifest = tiny_copy / "manifest.txt"
    wide = str(1 << 30)
    lines = manifest.read_text().splitlines()
    for i, line in enumerate(lines):
        if line.startswith(("gemm ", "gemm_chunks ")):
            key, elems = line.split()[1], str((1 << 32) - 1)
            if key == "up":
                line = line.replace("c_stride=192", f"c_stride={wide}")
                line = " ".join(
                    f"c_elems={elems}" if w.startswith("c_elems") else w for w in line.split()
                )
            if key == "down":
                line = line.replace("lda=192", f"lda={wide}")
                line = " ".join(
                    f"a_elems={elems}" if w.startswith("a_elems") else w for w in line.split()
                )
            lines[i] = line
    manifest.write_text("\n".join(lines) + "\n")
    with pytest.raises(BundleError, match=r"wanted at (most|least)"):
        load(tiny_copy)


@pytest.mark.parametrize("token", [1000, -1, -(2**31)])
def test_a_token_id_outside_the_vocabulary_is_a_bundle_error(token: int, tiny_bundle: Path) -> None:
    model = load(tiny_bundle)
    ids = np.array([2, token, 3], np.int32)
    (pack,) = make_packs([3], 2048)
    with pytest.raises(BundleError, match=f"token id {token}, wanted less than vocab_size 1000"):
        models.forward(model, [ids], pack, Timing())
    model.close()


def _large(file: str, size_bytes: int) -> Change:
    """A file as large as that, with nothing in it."""

    def change(bundle: Path) -> None:
        with (bundle / file).open("wb") as sparse:
            sparse.truncate(size_bytes)

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_large("kernels/gemm.xclbin", (256 << 20) + 1), r"wanted at most 268435456"),
        (
            replaced("param max_rows 2048", "param max_rows 65537"),
            r"max_rows is '65537', wanted an integer 1 to 65536",
        ),
        (
            replaced("version 1\n", "version 1\nparam default_prompt query\n"),
            r"txt:2: param default_prompt query, wanted one of the prompt records \(none\)",
        ),
    ],
)
def test_what_no_sound_bundle_has_is_refused_at_open(
    tiny_copy: Path, change: Change, words: str
) -> None:
    change(tiny_copy)
    with pytest.raises(BundleError, match=words):
        Bundle.open(tiny_copy)


def test_words_that_are_others_are_refused_before_a_run(tiny_copy: Path) -> None:
    replaced("kv_words=14,", "kv_words=15,")(tiny_copy)
    bundle = Bundle.open(tiny_copy)
    mha = bundle.specs.mhas[0]
    with pytest.raises(BundleError, match=r"manifest.txt:\d+: kv word 15 is no value of a WRITE"):
        bundle.stream(mha, mha.insts)


def test_the_row_buffers_are_bounded_together(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = Bundle.open(tiny_bundle)
    rows = 2048 + bundle.specs.mhas[-1].rows
    taken = 2 * rows * (64 + 192 + 64 + 64 + bundle.specs.gemms["up"].c_stride)
    monkeypatch.setattr(checks, "MAX_BUFFER_BYTES", taken)
    models.load(Session.open("emulated"), bundle, 2048).close()
    monkeypatch.setattr(checks, "MAX_BUFFER_BYTES", taken - 1)
    line = bundle.manifest.param_lines["max_rows"]
    with pytest.raises(BundleError, match=rf"manifest.txt:{line}: the row buffers .* take {taken}"):
        models.load(Session.open("emulated"), bundle, 2048)


def _outside(path: Path) -> None:
    path.rename(path.parent.parent / "outside")
    path.symlink_to("../outside")


def _device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _fifo_at(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder_at(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("file", ["manifest.txt", SAFETENSORS, "tokenizer.json"])
@pytest.mark.parametrize(
    ("replace", "words"),
    [
        (_outside, "a link that leads out of the bundle"),
        (_device, "a link that leads out of the bundle"),
        (_fifo_at, "not a regular file"),
        (_folder_at, "not a regular file"),
    ],
)
def test_a_file_no_record_names_is_one_of_the_bundle_too(
    tiny_copy: Path, file: str, replace: Callable[[Path], None], words: str
) -> None:
    replace(tiny_copy / file)
    with pytest.raises(BundleError, match=f"{file}.*{words}"):
        Bundle.open(tiny_copy).open_tokenizer()
