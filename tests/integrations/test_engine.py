"""What the adapters have in common, without any framework."""

from __future__ import annotations

import builtins
import importlib
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import npu_embed
from npu_embed import Embedder, InputError, InputTypeError, SettingError, api
from npu_embed.driver import Xrt as Anything
from npu_embed.integrations.engine import DEFAULT_NAME, Engine, text_of

TEXTS = ["two cats on a sofa", "a", "a red car"]


def engine(
    bundle: str | Path | None = None, device: str | None = None, **others: Anything
) -> Engine:
    """An engine of these arguments, the others left out."""
    options = {
        "embedder": None,
        "query_prompt": None,
        "document_prompt": None,
        "dim": None,
        "truncate": True,
    }
    return Engine.of(bundle, device, **{**options, **others})


def test_queries_and_documents_have_the_bundles_prompts(embedder: Embedder) -> None:
    given = engine(embedder=embedder)
    np.testing.assert_array_equal(given.queries(TEXTS), embedder.embed(TEXTS, "query"))
    np.testing.assert_array_equal(given.documents(TEXTS), embedder.embed(TEXTS, "passage"))


def test_prompts_by_name_go_before(embedder: Embedder) -> None:
    given = engine(embedder=embedder, query_prompt="Other", document_prompt="query")
    np.testing.assert_array_equal(given.queries(TEXTS), embedder.embed(TEXTS, "Other"))
    np.testing.assert_array_equal(given.documents(TEXTS), embedder.embed(TEXTS, "query"))


@pytest.mark.parametrize("prompt", [None, "Other"])
def test_dim_and_truncate_are_those_of_embed(embedder: Embedder, prompt: str | None) -> None:
    cut = engine(embedder=embedder, dim=16, query_prompt=prompt, document_prompt=prompt)
    assert cut.queries(TEXTS).shape == cut.documents(TEXTS).shape == (3, 16)
    whole = engine(embedder=embedder, truncate=False, query_prompt=prompt, document_prompt=prompt)
    for embed in (whole.queries, whole.documents):
        with pytest.raises(InputError, match=r"tokens, this bundle runs at most 128.*truncate="):
            embed(["a " * 1000])


def test_what_is_named_is_opened_when_needed_and_once(prompted_bundle: Path) -> None:
    before = dict(api._shared)
    first, second = (engine(prompted_bundle, "emulated") for _ in range(2))
    assert api._shared == before
    first.queries(["a"])
    second.documents(["a"])
    assert len(api._shared) == len(before) + 1
    assert first.open() is second.open()
    np.testing.assert_array_equal(
        npu_embed.embed("a", bundle=prompted_bundle, device="emulated", prompt="query"),
        first.queries(["a"])[0],
    )


def test_a_recipes_name_is_kept_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert engine("minilm").bundle == "minilm"
    monkeypatch.setenv("NPU_EMBED_BUNDLE", "minilm")
    assert engine().bundle == "minilm"
    (tmp_path / "minilm").mkdir()  # a folder of that name comes first
    assert engine("minilm").bundle == str(tmp_path / "minilm")


def test_a_relative_path_is_kept_as_an_absolute_one(
    prompted_bundle: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(prompted_bundle.parent)
    named = engine("bundle", "emulated")
    monkeypatch.chdir(tmp_path)
    assert named.bundle == str(prompted_bundle)
    assert named.queries(["a"]).shape == (1, 64)


def test_the_settings_bundle_is_kept_by_its_path(
    prompted_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine().names()["bundle"] is None
    monkeypatch.setenv("NPU_EMBED_BUNDLE", str(prompted_bundle))
    assert engine().names()["bundle"] == str(prompted_bundle)


def test_the_name_opens_nothing(embedder: Embedder, tmp_path: Path) -> None:
    assert engine().name == DEFAULT_NAME
    assert engine(tmp_path / "minilm").name == "minilm"
    assert engine(embedder=embedder).name == "tiny-bert"


@pytest.mark.parametrize("give", [False, True])
def test_it_is_pickled_by_its_names(embedder: Embedder, prompted_bundle: Path, give: bool) -> None:
    who: dict[str, Any] = (
        {"embedder": embedder} if give else {"bundle": prompted_bundle, "device": "emulated"}
    )
    made = engine(**who, query_prompt="Other", document_prompt="query", dim=8, truncate=False)
    data = pickle.dumps(made)
    assert len(data) < 1000
    again = pickle.loads(data)
    assert again == made
    assert again.embedder is None
    assert Engine(**made.names()) == made
    np.testing.assert_array_equal(again.queries(TEXTS), made.queries(TEXTS))


def test_an_embedder_that_its_path_does_not_say_all_of_is_not_pickled(
    prompted_bundle: Path,
) -> None:
    with Embedder(prompted_bundle, "emulated", plain_specials=True) as opened:
        given = engine(embedder=opened)
        given.queries(["a [SEP] b"])
        with pytest.raises(InputError, match=r"plain_specials=True, .*to pickle or serialize"):
            pickle.dumps(given)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"bundle": 3}, InputTypeError, r"bundle=3: int, wanted a path"),
        ({"bundle": "a\0b"}, InputError, r"a NUL in a path"),
        ({"device": "tpu"}, SettingError, r"device='tpu': unknown device, wanted 'auto'"),
        ({"embedder": "minilm"}, InputTypeError, r"embedder: str, wanted an Embedder"),
    ],
)
def test_an_argument_that_cannot_be_used_is_refused_at_once(
    arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        engine(**arguments)


@pytest.mark.parametrize("name", ["bundle", "device"])
def test_an_embedder_is_given_or_named_not_both(embedder: Embedder, name: str) -> None:
    with pytest.raises(InputError, match=r"embedder=\.\.\.: a bundle or device as well"):
        engine(**{name: "emulated"}, embedder=embedder)


@pytest.mark.parametrize("text", [None, 3, ["a"], b"a"])
def test_one_text_is_a_str(text: object) -> None:
    with pytest.raises(InputTypeError, match=rf"text: {type(text).__name__}, wanted str"):
        text_of(text)


@pytest.mark.parametrize(
    ("module", "package", "brings", "extra"),
    [
        ("langchain", "langchain_core", "langchain-core", "langchain"),
        ("llama_index", "llama_index", "llama-index-core", "llama-index"),
        ("chroma", "chromadb", "chromadb", "chroma"),
        ("haystack", "haystack", "haystack-ai", "haystack"),
        ("mteb", "mteb", "mteb", "mteb"),
    ],
)
def test_without_its_package_an_adapter_names_the_extra(
    module: str, package: str, brings: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Anything) -> Anything:
        if name.partition(".")[0] == package and not (len(rest) > 3 and rest[3]):
            raise ModuleNotFoundError(f"No module named {package!r}")
        return real(name, *rest)

    name = f"npu_embed.integrations.{module}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    words = rf"{name}: {brings} cannot be imported.*pip install 'npu-embed\[{extra}\]'"
    with pytest.raises(ModuleNotFoundError, match=words):
        importlib.import_module(name)
