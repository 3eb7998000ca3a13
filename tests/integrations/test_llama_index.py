"""LlamaIndex's embedding model, with llama-index-core itself."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.schema import TextNode

from npu_embed import Embedder, InputError, InputTypeError
from npu_embed.integrations.llama_index import BATCH_TEXTS, NpuEmbedding

TEXTS = ["two cats on a sofa", "a", "a red car"]


@pytest.fixture
def model(prompted_bundle: Path) -> NpuEmbedding:
    return NpuEmbedding(prompted_bundle, "emulated")


def test_it_is_a_base_embedding(model: NpuEmbedding) -> None:
    assert isinstance(model, BaseEmbedding)
    assert model.embed_batch_size == BATCH_TEXTS
    assert model.model_name == "bundle"


def test_texts_and_queries_are_lists_of_floats(model: NpuEmbedding, embedder: Embedder) -> None:
    texts = model.get_text_embedding_batch(TEXTS)
    query = model.get_query_embedding("cats")
    assert {type(number) for row in [*texts, query] for number in row} == {float}
    np.testing.assert_array_equal(texts, embedder.embed(TEXTS, "passage"))
    np.testing.assert_array_equal(query, embedder.embed("cats", "query"))
    np.testing.assert_array_equal(
        model.get_text_embedding(TEXTS[0]), embedder.embed(TEXTS[0], "passage")
    )


def test_a_batch_is_one_call_of_the_engine(embedder: Embedder) -> None:
    calls = embedder.stats.packs
    NpuEmbedding(embedder=embedder).get_text_embedding_batch(TEXTS * 10)
    assert embedder.stats.packs == calls + 1
    NpuEmbedding(embedder=embedder, embed_batch_size=15).get_text_embedding_batch(TEXTS * 10)
    assert embedder.stats.packs == calls + 3


def test_the_options_arrive(embedder: Embedder) -> None:
    model = NpuEmbedding(
        embedder=embedder,
        query_prompt="Other",
        document_prompt="query",
        dim=8,
        truncate=False,
        model_name="mine",
    )
    assert model.model_name == "mine"
    np.testing.assert_array_equal(model.get_query_embedding("a"), embedder.embed("a", "Other", 8))
    np.testing.assert_array_equal(model.get_text_embedding("a"), embedder.embed("a", "query", 8))
    with pytest.raises(InputError, match=r"truncate="):
        model.get_text_embedding("a " * 1000)


def test_the_asynchronous_methods_give_the_same(model: NpuEmbedding) -> None:
    async def all_three() -> tuple[Any, ...]:
        return (
            await model.aget_text_embedding_batch(TEXTS),
            await model.aget_text_embedding(TEXTS[0]),
            await model.aget_query_embedding("cats"),
        )

    batch, text, query = asyncio.run(all_three())
    assert batch == model.get_text_embedding_batch(TEXTS)
    assert text == model.get_text_embedding(TEXTS[0])
    assert query == model.get_query_embedding("cats")


def test_an_index_finds_the_text(model: NpuEmbedding) -> None:
    index = VectorStoreIndex([TextNode(text=text) for text in TEXTS], embed_model=model)
    found = index.as_retriever(similarity_top_k=3).retrieve(TEXTS[2])
    wanted = np.array(model.get_text_embedding_batch(TEXTS)) @ model.get_query_embedding(TEXTS[2])
    assert [node.text for node in found] == [TEXTS[i] for i in np.argsort(-wanted)]


def test_to_dict_and_pickle_keep_the_names(embedder: Embedder, prompted_bundle: Path) -> None:
    model = NpuEmbedding(embedder=embedder, query_prompt="Other", dim=8, embed_batch_size=3)
    written = model.to_dict()
    assert written["class_name"] == "NpuEmbedding"
    assert written["bundle"] == str(prompted_bundle)
    for again in (NpuEmbedding.from_dict(written), pickle.loads(pickle.dumps(model))):
        assert again.to_dict() == written
        assert again.get_query_embedding("cats") == model.get_query_embedding("cats")


def test_the_engines_options_do_not_change_under_it(model: NpuEmbedding) -> None:
    with pytest.raises(ValueError, match=r"[Ff]rozen"):
        model.dim = 3


def test_a_list_is_no_query(model: NpuEmbedding) -> None:
    with pytest.raises(InputTypeError, match=r"text: list, wanted str"):
        model._get_query_embedding(["a"])  # type: ignore[arg-type]
