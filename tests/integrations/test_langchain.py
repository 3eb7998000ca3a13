"""LangChain's embeddings, with langchain-core itself."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path

import numpy as np
import pytest
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import InMemoryVectorStore

from npu_embed import Embedder, InputError, InputTypeError
from npu_embed.integrations.langchain import NpuEmbeddings

TEXTS = ["two cats on a sofa", "a", "a red car"]


@pytest.fixture
def embeddings(prompted_bundle: Path) -> NpuEmbeddings:
    return NpuEmbeddings(prompted_bundle, "emulated")


def test_it_is_an_embeddings(embeddings: NpuEmbeddings) -> None:
    assert isinstance(embeddings, Embeddings)


def test_documents_and_queries_are_lists_of_floats(
    embeddings: NpuEmbeddings, embedder: Embedder
) -> None:
    documents = embeddings.embed_documents(TEXTS)
    query = embeddings.embed_query("cats")
    assert {type(number) for row in [*documents, query] for number in row} == {float}
    np.testing.assert_array_equal(documents, embedder.embed(TEXTS, "passage"))
    np.testing.assert_array_equal(query, embedder.embed("cats", "query"))
    assert embeddings.embed_documents([]) == []


def test_the_options_arrive(embedder: Embedder) -> None:
    embeddings = NpuEmbeddings(
        embedder=embedder, query_prompt="Other", document_prompt="query", dim=8, truncate=False
    )
    np.testing.assert_array_equal(embeddings.embed_query("a"), embedder.embed("a", "Other", 8))
    np.testing.assert_array_equal(
        embeddings.embed_documents(TEXTS), embedder.embed(TEXTS, "query", 8)
    )
    with pytest.raises(InputError, match=r"truncate="):
        embeddings.embed_query("a " * 1000)


def test_the_asynchronous_methods_give_the_same(embeddings: NpuEmbeddings) -> None:
    async def both() -> tuple[list[list[float]], list[float]]:
        return await embeddings.aembed_documents(TEXTS), await embeddings.aembed_query("cats")

    documents, query = asyncio.run(both())
    assert documents == embeddings.embed_documents(TEXTS)
    assert query == embeddings.embed_query("cats")


def test_a_vector_store_finds_the_text(embeddings: NpuEmbeddings) -> None:
    store = InMemoryVectorStore.from_texts(TEXTS, embeddings)
    wanted = np.array(embeddings.embed_documents(TEXTS)) @ embeddings.embed_query(TEXTS[2])
    found = store.similarity_search_with_score(TEXTS[2], k=3)
    assert [d.page_content for d, _ in found] == [TEXTS[i] for i in np.argsort(-wanted)]
    np.testing.assert_allclose([score for _, score in found], np.sort(wanted)[::-1], rtol=1e-5)


def test_a_pickled_one_gives_the_same(embeddings: NpuEmbeddings) -> None:
    again = pickle.loads(pickle.dumps(embeddings))
    assert again.embed_query("cats") == embeddings.embed_query("cats")


def test_a_list_is_no_query(embeddings: NpuEmbeddings) -> None:
    with pytest.raises(InputTypeError, match=r"text: list, wanted str"):
        embeddings.embed_query(["a"])  # type: ignore[arg-type]
