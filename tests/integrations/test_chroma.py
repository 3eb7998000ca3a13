"""Chroma's embedding function, with chromadb itself."""

from __future__ import annotations

import importlib
import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chromadb
import numpy as np
import pytest
from chromadb.config import Settings
from chromadb.utils.embedding_functions import (
    config_to_embedding_function,
    known_embedding_functions,
)

from npu_embed import Embedder, InputError, integrations
from npu_embed.driver import Xrt as Anything
from npu_embed.integrations import chroma
from npu_embed.integrations.chroma import LASTING, NpuEmbeddingFunction

TEXTS = ["two cats on a sofa", "a", "a red car"]
QUIET = Settings(anonymized_telemetry=False)


@pytest.fixture
def function(prompted_bundle: Path) -> NpuEmbeddingFunction:
    return NpuEmbeddingFunction(prompted_bundle, "emulated")


@pytest.fixture
def client() -> Iterator[Any]:
    opened = chromadb.EphemeralClient(settings=QUIET)
    yield opened
    for collection in opened.list_collections():
        opened.delete_collection(collection.name)


def test_documents_and_queries_are_float32_rows(
    function: NpuEmbeddingFunction, embedder: Embedder
) -> None:
    documents, queries = function(TEXTS), function.embed_query(TEXTS)
    assert {row.dtype for row in [*documents, *queries]} == {np.dtype(np.float32)}
    np.testing.assert_array_equal(documents, embedder.embed(TEXTS, "passage"))
    np.testing.assert_array_equal(queries, embedder.embed(TEXTS, "query"))


def test_the_options_arrive(embedder: Embedder) -> None:
    function = NpuEmbeddingFunction(
        embedder=embedder, query_prompt="Other", document_prompt="query", dim=8, truncate=False
    )
    np.testing.assert_array_equal(function.embed_query(["a"]), embedder.embed(["a"], "Other", 8))
    np.testing.assert_array_equal(function(["a"]), embedder.embed(["a"], "query", 8))
    with pytest.raises(InputError, match=r"truncate="):
        function(["a " * 1000])


def test_a_collection_finds_the_text(client: Anything, function: NpuEmbeddingFunction) -> None:
    collection = client.create_collection("texts", embedding_function=function)
    collection.add(ids=["0", "1", "2"], documents=TEXTS)
    found = collection.query(query_texts=[TEXTS[2]], n_results=3)
    cosines = np.array(function(TEXTS)) @ function.embed_query([TEXTS[2]])[0]
    assert found["documents"] == [[TEXTS[i] for i in np.argsort(-cosines)]]
    # Without a space of the collection's own the distance is the function's: 1 - cosine.
    np.testing.assert_allclose(found["distances"][0], 1 - np.sort(cosines)[::-1], atol=1e-5)


def test_a_stored_collection_opens_with_its_function(
    tmp_path: Path, function: NpuEmbeddingFunction
) -> None:
    stored: Anything = chromadb.PersistentClient(str(tmp_path), settings=QUIET)
    stored.create_collection("texts", embedding_function=function).add(ids=["0"], documents=["a"])
    chromadb.api.shared_system_client.SharedSystemClient.clear_system_cache()
    collection = chromadb.PersistentClient(str(tmp_path), settings=QUIET).get_collection("texts")
    assert collection.query(query_texts=["a"])["documents"] == [["a"]]
    opened = collection.configuration["embedding_function"]
    assert isinstance(opened, NpuEmbeddingFunction)
    assert opened.get_config() == function.get_config()


def test_the_config_is_json_and_makes_the_same_function(
    embedder: Embedder, prompted_bundle: Path
) -> None:
    function = NpuEmbeddingFunction(embedder=embedder, query_prompt="Other", dim=8)
    config = json.loads(json.dumps(function.get_config()))
    assert config["bundle"] == str(prompted_bundle)
    again = config_to_embedding_function({"name": "npu_embed", "config": config})
    assert isinstance(again, NpuEmbeddingFunction)
    assert again.get_config() == function.get_config()
    np.testing.assert_array_equal(again.embed_query(["a"]), function.embed_query(["a"]))
    assert not again.is_legacy()
    assert again.default_space() == "cosine"


def test_an_import_makes_the_name_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(known_embedding_functions, "npu_embed")
    monkeypatch.delitem(sys.modules, chroma.__name__)
    monkeypatch.setattr(integrations, "chroma", chroma)  # is put back after the test
    again = importlib.import_module(chroma.__name__)
    assert known_embedding_functions["npu_embed"] is again.NpuEmbeddingFunction


@pytest.mark.parametrize("option", LASTING)
def test_what_stored_vectors_depend_on_cannot_change(
    function: NpuEmbeddingFunction, option: str
) -> None:
    old = function.get_config()
    words = rf"{option}='else': this collection was made with"
    with pytest.raises(InputError, match=words):
        function.validate_config_update(old, {**old, option: "else"})
    function.validate_config_update(old, {**old, "device": "npu"})
    function.validate_config_update(old, {})


def test_a_pickled_one_gives_the_same(function: NpuEmbeddingFunction) -> None:
    again = pickle.loads(pickle.dumps(function))
    np.testing.assert_array_equal(again(TEXTS), function(TEXTS))
