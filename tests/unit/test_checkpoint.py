"""Checkpoint folders in all their forms: what is read, and what is refused by name."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from npu_embed.bf16 import round_f32, to_bf16
from npu_embed.emulator import txn
from npu_embed.errors import BundleError
from npu_embed.exporters import bert, export_checkpoint
from npu_embed.exporters.bert_config import bert_config
from npu_embed.exporters.checkpoint import open_checkpoint
from npu_embed.manifest import Manifest
from npu_embed.specs import parse_specs
from npu_embed.tensors import open_tensors, write_safetensors

TINY = Path(__file__).parent.parent / "data" / "tiny-bert"

Edit = Callable[[Path], None]


def edit_json(path: Path, **changes: object) -> None:
    """Set keys of a JSON object in a file; `...` removes one."""
    values = json.loads(path.read_text()) if path.exists() else {}
    values.update(changes)
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))


def edit_weights(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture(scope="module", autouse=True)
def few_chunks() -> Iterator[None]:
    """Fewer streams: none of these tests counts them."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(bert, "MAX_CHUNKS", 2)
        yield


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint, to be changed."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("references*"))
    return folder


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unchanged checkpoint's bundle, only to be read."""
    return export_checkpoint(TINY, tmp_path_factory.mktemp("export") / "bundle")


def plain_hf_folder(folder: Path) -> None:
    for name in ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"):
        (folder / name).unlink()
    shutil.rmtree(folder / "1_Pooling")


def test_a_plain_folder_is_pooled_by_mean_and_says_so(
    checkpoint: Path, bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain_hf_folder(checkpoint)
    with caplog.at_level(logging.WARNING):
        out = export_checkpoint(checkpoint, checkpoint.parent / "out")
    assert "no modules.json" in caplog.text
    assert "mean pooling and unit length" in caplog.text
    params = dict(Manifest.read(out).params)
    assert params == {**Manifest.read(bundle).params, "name": "checkpoint"}


def rewrite(folder: Path, rename: Callable[[str], str], dtype: str) -> None:
    """The weights under other names in another dtype, the values as before where it holds them."""
    tensors: dict[str, NDArray[Any]] = {}
    for name, value in load_file(folder / "model.safetensors").items():
        tensors[rename(name)] = {"F32": value, "F16": value.astype(np.float16)}.get(dtype, value)
        if dtype == "BF16":
            tensors[rename(name)] = to_bf16(value)
    bf16 = list(tensors) if dtype == "BF16" else []
    write_safetensors(folder / "model.safetensors", tensors, bf16)


def old_name(name: str) -> str:
    for new, old in (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")):
        name = name.replace(new, old)
    return f"bert.{name}"


@pytest.mark.parametrize(
    ("rename", "dtype"),
    [(str, "F16"), (str, "BF16"), (lambda name: f"bert.{name}", "F32"), (old_name, "F32")],
    ids=["f16", "bf16", "prefix", "tensorflow names"],
)
def test_other_dtypes_and_names_of_the_same_weights_are_read(
    checkpoint: Path, bundle: Path, rename: Callable[[str], str], dtype: str
) -> None:
    rewrite(checkpoint, rename, dtype)
    found = open_tensors(export_checkpoint(checkpoint, checkpoint.parent / "out"))
    name = "encoder.layer.1.output.LayerNorm.weight"
    wanted = open_tensors(bundle).f32(name)
    halves = wanted.astype(np.float16).astype(np.float32)
    exact = {"F32": wanted, "F16": halves, "BF16": round_f32(wanted)}[dtype]
    np.testing.assert_array_equal(found.f32(name), exact)


def test_tensors_no_embedding_needs_are_left_out(checkpoint: Path) -> None:
    unused = {
        "pooler.dense.weight": np.zeros((64, 64), np.float32),
        "cls.predictions.bias": np.zeros(1000, np.float32),
        "embeddings.position_ids": np.arange(128, dtype=np.int64)[None],
    }
    edit_weights(checkpoint, lambda tensors: tensors.update(unused))
    found = open_tensors(export_checkpoint(checkpoint, checkpoint.parent / "out"))
    assert not set(unused) & set(found.names())


def test_prompts_are_written_and_one_of_them_is_checked(checkpoint: Path) -> None:
    edit_json(
        checkpoint / "config_sentence_transformers.json",
        prompts={"query": "task: search | query: ", "document": ""},
        default_prompt_name="document",
    )
    out = export_checkpoint(checkpoint, checkpoint.parent / "out")
    manifest = Manifest.read(out)
    prompts = {r.field(0, "NAME"): r.field_hex(1, "HEX") for r in manifest.tagged("prompt")}
    assert prompts == {"query": "task: search | query: ", "document": ""}
    assert manifest.params["default_prompt"] == "document"
    trefs = [record.field(1, "PROMPT") for record in manifest.tagged("tref")]
    assert trefs == ["-"] * 6 + ["query"]
    tensors = open_tensors(out)
    assert len(tensors.i32("tref.6.ids")) > len(tensors.i32("tref.1.ids"))


@pytest.mark.parametrize(
    ("pooling", "wanted"),
    [
        ({"pooling_mode_mean_tokens": False, "pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_mean_tokens": ..., "pooling_mode_cls_token": ...,
          "pooling_mode_max_tokens": ...}, "mean"),
        ({"pooling_mode": "cls"}, "cls"),
    ],
)  # fmt: skip
def test_pooling_modes_are_read(checkpoint: Path, pooling: dict[str, Any], wanted: str) -> None:
    edit_json(checkpoint / "1_Pooling/config.json", **pooling)
    out = export_checkpoint(checkpoint, checkpoint.parent / "out")
    assert Manifest.read(out).params["pooling"] == wanted
    tensors = open_tensors(out)
    hidden, embedding = tensors.f32("tref.1.hidden")[-1], tensors.f32("tref.1.embedding")
    pooled = {"max": hidden.max(axis=0), "cls": hidden[0], "mean": hidden.mean(axis=0)}[wanted]
    np.testing.assert_allclose(embedding, pooled / np.linalg.norm(pooled), atol=1e-6)


def without_normalize(folder: Path) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps(modules[:2]))


def test_a_model_without_normalize_keeps_its_length(checkpoint: Path) -> None:
    without_normalize(checkpoint)
    out = export_checkpoint(checkpoint, checkpoint.parent / "out")
    manifest, tensors = Manifest.read(out), open_tensors(out)
    assert manifest.params["normalize"] == "0"
    assert manifest.params["stages"] == "embeddings,layers,pooling"
    embedding = tensors.f32("tref.1.embedding")
    np.testing.assert_allclose(embedding, tensors.f32("tref.1.hidden")[-1].mean(axis=0), atol=1e-6)
    assert abs(float(np.linalg.norm(embedding)) - 1) > 0.1


def test_a_tanh_gelu_becomes_the_tanh_epilogue(checkpoint: Path, bundle: Path) -> None:
    edit_json(checkpoint / "config.json", hidden_act="gelu_new")
    out = export_checkpoint(checkpoint, checkpoint.parent / "out")
    epilogues = []
    for folder in (bundle, out):
        stream = txn.decode((folder / "kernels/up_x1.insts.bin").read_bytes())
        epilogues.append([op.value for op in stream.ops if isinstance(op, txn.Write)][3])
    assert epilogues == [1, 2]
    hidden = [open_tensors(folder).f32("tref.1.hidden") for folder in (bundle, out)]
    assert 0 < np.abs(hidden[0] - hidden[1]).max() < 0.05


@pytest.mark.parametrize(
    ("max_seq_length", "model_max_length", "max_tokens"),
    [
        (128, 512, 128),
        (20, 512, 20),
        (12, 5, 12),
        (None, 64, 64),
        (None, 10**30, 128),
        (None, 1e30, 128),
        (None, None, 128),
    ],
)
def test_the_token_limit_is_the_reference_pipelines(
    checkpoint: Path, max_seq_length: int | None, model_max_length: float | None, max_tokens: int
) -> None:
    edit_json(checkpoint / "sentence_bert_config.json", max_seq_length=max_seq_length)
    edit_json(checkpoint / "tokenizer_config.json", model_max_length=model_max_length)
    assert open_checkpoint(checkpoint).max_tokens(128) == max_tokens


def test_the_last_bucket_holds_the_longest_text(checkpoint: Path) -> None:
    edit_json(checkpoint / "sentence_bert_config.json", max_seq_length=20)
    out = export_checkpoint(checkpoint, checkpoint.parent / "out")
    manifest = Manifest.read(out)
    assert manifest.param_int("max_tokens") == 20
    assert [mha.rows for mha in parse_specs(manifest).mhas] == [16, 32]
    assert len(open_tensors(out).i32("tref.5.ids")) == 20


# --- checkpoints that are refused ---------------------------------------------------------------


def config(**changes: object) -> Edit:
    return lambda folder: edit_json(folder / "config.json", **changes)


def pooling(**changes: object) -> Edit:
    return lambda folder: edit_json(folder / "1_Pooling/config.json", **changes)


def prompts(**changes: object) -> Edit:
    return lambda folder: edit_json(folder / "config_sentence_transformers.json", **changes)


def limit(**changes: object) -> Edit:
    return lambda folder: edit_json(folder / "sentence_bert_config.json", **changes)


def tokenizer_config(**changes: object) -> Edit:
    return lambda folder: edit_json(folder / "tokenizer_config.json", **changes)


def modules(*entries: tuple[str, str]) -> Edit:
    listed = [{"type": kind, "path": path} for kind, path in entries]
    return write("modules.json", json.dumps(listed).encode())


def write(file: str, content: bytes) -> Edit:
    def edit(folder: Path) -> None:
        (folder / file).write_bytes(content)

    return edit


def both(first: Edit, second: Edit) -> Edit:
    def edit(folder: Path) -> None:
        first(folder)
        second(folder)

    return edit


def remove(file: str) -> Edit:
    return lambda folder: (folder / file).unlink()


def rename(file: str, to: str) -> Edit:
    def edit(folder: Path) -> None:
        (folder / file).rename(folder / to)

    return edit


def tensor(name: str, change: Callable[[NDArray[Any]], NDArray[Any]]) -> Edit:
    """The edit that replaces a tensor by change(tensor)."""
    return lambda folder: edit_weights(folder, lambda t: t.update({name: change(t[name])}))


def more(name: str) -> Edit:
    """The edit that adds a tensor."""
    zeros = np.zeros((64, 64), np.float32)
    return lambda folder: edit_weights(folder, lambda tensors: tensors.update({name: zeros}))


def less(name: str) -> Edit:
    """The edit that removes a tensor."""

    def change(tensors: dict[str, Any]) -> None:
        del tensors[name]

    return lambda folder: edit_weights(folder, change)


def with_nan(array: NDArray[np.float32]) -> NDArray[np.float32]:
    array = array.copy()
    array.reshape(-1)[3:5] = np.nan, np.inf
    return array


ST = "sentence_transformers.models."
TRANSFORMER, POOLING = (ST + "Transformer", ""), (ST + "Pooling", "1_Pooling")
QUERY = "encoder.layer.2.attention.self.query.weight"

REFUSED: list[tuple[Edit, str]] = [
    (config(model_type="mpnet"), "config.json: model_type 'mpnet', wanted 'bert', 'roberta'"),
    (config(model_type=...), "config.json: model_type missing, wanted 'bert'"),
    (config(hidden_act="relu"),
     "config.json: hidden_act 'relu', wanted 'gelu', 'gelu_new' or 'gelu_pytorch_tanh'"),
    (config(hidden_act=...), "config.json: hidden_act missing"),
    (config(position_embedding_type="relative_key"),
     "position_embedding_type 'relative_key', wanted 'absolute'"),
    (config(is_decoder=True), "config.json: is_decoder True, wanted false"),
    (config(is_decoder="yes"), "is_decoder 'yes', wanted true or false"),
    (config(add_cross_attention=True), "config.json: add_cross_attention True, wanted false"),
    (config(pruned_heads={"0": [1]}), r"config.json: pruned_heads {'0': \[1\]}, wanted none"),
    (config(quantization_config={"bits": 4}), "config.json: quantization_config .*float weights"),
    (config(num_attention_heads=5),
     "num_attention_heads 5, wanted heads of an even width that fill hidden_size 64"),
    (config(num_attention_heads=64), "num_attention_heads 64, wanted heads of an even width"),
    (config(num_hidden_layers=0), "num_hidden_layers 0, wanted an integer >= 1"),
    (config(num_hidden_layers=True), "num_hidden_layers True, wanted an integer >= 1"),
    (config(num_hidden_layers=2.5), "num_hidden_layers 2.5, wanted an integer >= 1"),
    (config(hidden_size="64"), "hidden_size '64', wanted an integer >= 1"),
    (config(vocab_size=...), "config.json: vocab_size missing, wanted an integer >= 1"),
    (config(vocab_size=2**31), "vocab_size 2147483648, wanted an integer 1 to 2147483647"),
    (config(hidden_size=2**15 + 2), "hidden_size 32770, wanted an integer 1 to 32768"),
    (config(intermediate_size=1e30), "intermediate_size 1e\\+30, wanted an integer 1 to 32768"),
    (config(num_attention_heads=512), "num_attention_heads 512, wanted an integer 1 to 256"),
    (both(config(hidden_size=12_000, num_attention_heads=60),
          pooling(word_embedding_dimension=12_000)), "q, k and v of 36000 numbers, wanted at most"),
    (both(config(hidden_size=9000, num_attention_heads=60, num_hidden_layers=1000),
          pooling(word_embedding_dimension=9000)),
     "128 tokens, 1000 layers, hidden_size 9000 for the longest text, wanted at most 536870912"),
    (config(layer_norm_eps=0), "layer_norm_eps 0, wanted a number > 0"),
    (config(layer_norm_eps=1e300), r"layer_norm_eps 1e\+300, wanted a number > 0 and < 1"),
    (config(layer_norm_eps=1), "layer_norm_eps 1, wanted a number > 0 and < 1"),
    (config(layer_norm_eps=10**400), "wanted a number > 0 and < 1"),
    (config(layer_norm_eps=float("nan")), "layer_norm_eps nan, wanted a number > 0"),
    (config(vocab_size=999),
     r"embeddings.word_embeddings.weight has shape \[1000, 64\], wanted \[999, 64\]"),
    (config(num_hidden_layers=2),
     "tensor encoder.layer.2.* is not part of this model"),
    (config(num_hidden_layers=4), "tensor encoder.layer.3.* is missing"),
    (write("config.json", b"{"), "config.json: .*, wanted JSON"),
    (write("config.json", b"[]"), "config.json: a list, wanted a JSON object"),
    (write("config.json", b"\xff{}"), "config.json: .*, wanted JSON"),
    (write("config.json", b"[" * 100_000), "config.json: .*, wanted JSON"),
    (remove("config.json"), "config.json: No such file or directory, wanted a readable file"),
    (remove("model.safetensors"), "model.safetensors: missing from"),
    (remove("tokenizer.json"), "tokenizer.json: missing from"),
    (rename("model.safetensors", "model.safetensors.index.json"),
     "model.safetensors.index.json: a sharded checkpoint; merge"),
    (rename("model.safetensors", "pytorch_model.bin"), "pytorch_model.bin: a pickle"),
    (write("model.safetensors", b"short"), "model.safetensors"),
    (write("model.safetensors", b"\x02" + bytes(7) + b"[]"),
     "model.safetensors: the header is no JSON object, wanted one; download the checkpoint again"),
    (write("tokenizer.json", b"{}"), "tokenizer.json"),
    (modules(TRANSFORMER, POOLING, (ST + "Dense", "2_Dense")), "Dense after Pooling"),
    (modules(TRANSFORMER, POOLING, (ST + "Normalize", ""), (ST + "Normalize", "")),
     "Transformer, Pooling, Normalize, Normalize, wanted"),
    (modules(TRANSFORMER), "modules.json: Transformer, wanted Transformer, Pooling"),
    (modules(), "modules.json: no modules, wanted"),
    (modules(POOLING, TRANSFORMER), "modules.json: Pooling, Transformer, wanted"),
    (modules(TRANSFORMER, POOLING, (ST + "WeightedLayerPooling", "")),
     "type 'sentence_transformers.models.WeightedLayerPooling', wanted"),
    (modules(TRANSFORMER, POOLING, ("custom.Normalize", "")), "type 'custom.Normalize', wanted"),
    (modules(TRANSFORMER, (ST + "Pooling", "../x")), "path '../x', wanted a folder inside"),
    (modules(TRANSFORMER, (ST + "Pooling", "/etc")), "path '/etc', wanted a folder inside"),
    (modules(TRANSFORMER, (ST + "Pooling", "\ud800")), "path .*, wanted a folder inside"),
    (modules(TRANSFORMER, (ST + "Pooling", "x" * 5000)), "File name too long, wanted a readable"),
    (modules((ST + "Transformer", "x" * 5000), POOLING), "File name too long, wanted a readable"),
    (modules(TRANSFORMER, (ST + "Pooling", "2_Pooling")), "2_Pooling/config.json: No such file"),
    (write("modules.json", b"{}"), "modules.json: wanted a list of objects"),
    (pooling(pooling_mode_cls_token=True),
     "pooling_mode_cls_token and pooling_mode_mean_tokens true, wanted exactly one"),
    (pooling(pooling_mode_mean_tokens=False), "no pooling mode true, wanted exactly one"),
    (pooling(pooling_mode_lasttoken=True), "pooling_mode_lasttoken True, wanted only"),
    (pooling(pooling_mode_mean_sqrt_len_tokens=True), "pooling_mode_mean_sqrt_len_tokens True"),
    (pooling(pooling_mode="lasttoken"), "pooling_mode 'lasttoken', wanted 'mean', 'cls' or 'max'"),
    (pooling(include_prompt=False), "1_Pooling/config.json: include_prompt False, wanted true"),
    (pooling(word_embedding_dimension=32), "word_embedding_dimension 32, wanted hidden_size 64"),
    (prompts(prompts={"a b": "x"}), "prompt 'a b': 'x', wanted a name without white space"),
    (prompts(prompts={"": "x"}), "prompt '': 'x', wanted a name"),
    (prompts(prompts={"q": "\ud800"}), "no lone surrogates"),
    (prompts(prompts={"-": "x"}), "prompt '-': 'x', wanted a name .* which is not '-'"),
    (prompts(prompts={"q": "x" * 20_000}), "prompt 'q': 20001 bytes, wanted at most 16384"),
    (prompts(prompts={"q": 1}), "prompts .*, wanted an object of strings"),
    (prompts(default_prompt_name="q"), "default_prompt_name 'q', wanted one of no prompts"),
    (limit(max_seq_length=129), "max_seq_length 129, wanted at most max_position_embeddings 128"),
    (limit(max_seq_length=0), "max_seq_length 0, wanted an integer >= 1"),
    (limit(max_seq_length=2), "texts of 2 tokens, wanted 3 or more"),
    (limit(do_lower_case="no"), "do_lower_case 'no', wanted true or false"),
    (tokenizer_config(do_lower_case=False), "do_lower_case False, wanted True as in tokenizer"),
    (tensor(QUERY, with_nan), f"tensor {QUERY} has 2 values that are not finite"),
    (tensor(QUERY, lambda w: w[:, :32].copy()),
     rf"tensor {QUERY} has shape \[64, 32\], wanted \[64, 64\] by config.json"),
    (tensor(QUERY, lambda w: w.astype(np.int32)),
     f"tensor {QUERY} is i32, wanted f32, f16 or bf16"),
    (less(QUERY), f"tensor {QUERY} is missing"),
    (more(f"bert.{QUERY}"), f"{QUERY}.*wanted one of the two"),
    (more("x" * 9999), "tensor 'x+\\.\\.\\.x+' is not part of this model"),
    (tensor("encoder.layer.2.output.LayerNorm.weight", lambda w: np.full_like(w, 3e38)),
     "model.safetensors: the text 'hello' becomes no finite vector"),
    (more("encoder.layer.0.lora.weight"), "encoder.layer.0.lora.weight is not part of this model"),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "words"), REFUSED, ids=[words[:60] for _, words in REFUSED])
def test_what_would_be_computed_differently_is_refused_by_name(
    checkpoint: Path, edit: Edit, words: str
) -> None:
    edit(checkpoint)
    out = checkpoint.parent / "out"
    with pytest.raises(BundleError, match=words):
        export_checkpoint(checkpoint, out)
    assert os.listdir(checkpoint.parent) == ["checkpoint"]


def test_texts_over_512_tokens_are_refused(checkpoint: Path) -> None:
    edit_json(checkpoint / "config.json", max_position_embeddings=1024)
    edit_json(checkpoint / "sentence_bert_config.json", max_seq_length=513)
    with pytest.raises(BundleError, match="texts of 513 tokens, wanted at most 512"):
        export_checkpoint(checkpoint, checkpoint.parent / "out")


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(checkpoint: Path) -> None:
    edit_json(checkpoint / "config.json", vocab_size=900)
    table = "embeddings.word_embeddings.weight"
    edit_weights(checkpoint, lambda tensors: tensors.update({table: tensors[table][:900].copy()}))
    with pytest.raises(BundleError, match="1000 tokens, wanted at most vocab_size 900"):
        export_checkpoint(checkpoint, checkpoint.parent / "out")


def test_ids_that_leave_gaps_are_refused(checkpoint: Path) -> None:
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.__getitem__)
    del vocabulary[last]
    vocabulary["hello"] = 70_000  # no more tokens than the model has
    (checkpoint / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(BundleError, match="id 70000 for the text 'hello', wanted less than vocab"):
        export_checkpoint(checkpoint, checkpoint.parent / "out")


@pytest.mark.parametrize("value", ["x" * 10**6, ["y"] * 10**6, [[[[[[[[[[1]]]]]]]]]], 10**4000])
def test_errors_quote_what_a_stranger_wrote_in_short(checkpoint: Path, value: object) -> None:
    edit_json(checkpoint / "config.json", hidden_act=value)
    with pytest.raises(BundleError, match=r"config\.json: hidden_act .*, wanted 'gelu'") as caught:
        open_and_read(checkpoint)
    assert len(str(caught.value)) < 400


def open_and_read(folder: Path) -> None:
    bert_config(open_checkpoint(folder))


def test_lower_casing_outside_the_tokenizer_is_refused(checkpoint: Path) -> None:
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    tokenizer["normalizer"]["lowercase"] = False
    (checkpoint / "tokenizer.json").write_text(json.dumps(tokenizer))
    edit_json(checkpoint / "tokenizer_config.json", do_lower_case=...)
    edit_json(checkpoint / "sentence_bert_config.json", do_lower_case=True)
    with pytest.raises(BundleError, match="do_lower_case True, wanted false, since"):
        export_checkpoint(checkpoint, checkpoint.parent / "out")


@pytest.mark.parametrize("file", ["config.json", "modules.json", "1_Pooling/config.json"])
def test_a_fifo_is_refused_and_not_waited_for(checkpoint: Path, file: str) -> None:
    (checkpoint / file).unlink()
    os.mkfifo(checkpoint / file)
    with pytest.raises(BundleError, match=rf"{file}: no regular file"):
        open_checkpoint(checkpoint)


@pytest.mark.parametrize("file", ["config.json", "modules.json", "tokenizer.json"])
def test_a_file_larger_than_any_of_its_kind_is_refused(checkpoint: Path, file: str) -> None:
    os.truncate(checkpoint / file, 1 << 40)
    with pytest.raises(BundleError, match=rf"{file}: over 67108864 bytes, wanted JSON of a sane"):
        open_checkpoint(checkpoint)


def test_more_values_than_any_file_has_are_refused_before_they_are_read(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text('{"a": [' + "[]," * 2_000_000 + "0]}")
    with pytest.raises(BundleError, match=r"config\.json: \d+ JSON values, wanted at most 4000000"):
        open_checkpoint(checkpoint)


def test_a_model_of_a_million_layers_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    edit_json(checkpoint / "config.json", num_hidden_layers=1025)
    wanted = r"config.json: num_hidden_layers 1025, wanted an integer 1 to 1024"
    with pytest.raises(BundleError, match=wanted):
        export_checkpoint(checkpoint, tmp_path / "out")


def test_a_tokenizer_that_gives_the_empty_text_no_token_is_refused(
    checkpoint: Path, tmp_path: Path
) -> None:
    edit_json(checkpoint / "tokenizer.json", post_processor=None)
    with pytest.raises(BundleError, match=r"tokenizer.json: no token for the empty text"):
        export_checkpoint(checkpoint, tmp_path / "out")
