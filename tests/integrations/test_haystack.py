"""Haystack's components, with haystack-ai itself."""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from haystack import Document, Pipeline
from haystack.components.retrievers.in_memory import InMemoryEmbeddingRetriever
from haystack.components.writers import DocumentWriter
from haystack.document_stores.in_memory import InMemoryDocumentStore

from npu_embed import Embedder, InputError, InputTypeError, api
from npu_embed.driver import Xrt as Anything
from npu_embed.integrations.haystack import NpuDocumentEmbedder, NpuTextEmbedder

# Haystack 3 makes only what it is told to trust; earlier ones cannot be told.
TRUST: dict[str, Any] = {}
if "allowed_modules" in inspect.signature(Pipeline.loads).parameters:
    TRUST = {"allowed_modules": ["npu_embed.integrations.haystack"]}

TEXTS = ["two cats on a sofa", "a", "a red car"]


def test_a_text_is_embedded_as_a_query(embedder: Embedder) -> None:
    found = NpuTextEmbedder(embedder=embedder).run("cats")
    assert {type(number) for number in found["embedding"]} == {float}
    np.testing.assert_array_equal(found["embedding"], embedder.embed("cats", "query"))
    assert found["meta"] == {"model": "tiny-bert"}


def test_documents_are_copied_with_their_vectors_in_order(embedder: Embedder) -> None:
    documents = [Document(content=text, meta={"n": i}) for i, text in enumerate(TEXTS)]
    found = NpuDocumentEmbedder(embedder=embedder).run(documents)
    vectors = [document.embedding for document in found["documents"]]
    np.testing.assert_array_equal(vectors, embedder.embed(TEXTS, "passage"))
    assert [d.meta for d in found["documents"]] == [d.meta for d in documents]
    assert [d.id for d in found["documents"]] == [d.id for d in documents]
    assert [d.embedding for d in documents] == [None, None, None]
    assert found["meta"] == {"model": "tiny-bert"}
    assert NpuDocumentEmbedder(embedder=embedder).run([])["documents"] == []


def test_the_options_arrive(embedder: Embedder) -> None:
    text = NpuTextEmbedder(embedder=embedder, query_prompt="Other", dim=8, truncate=False)
    np.testing.assert_array_equal(text.run("a")["embedding"], embedder.embed("a", "Other", 8))
    documents = NpuDocumentEmbedder(
        embedder=embedder, document_prompt="query", dim=8, truncate=False
    )
    (found,) = documents.run([Document(content="a")])["documents"]
    np.testing.assert_array_equal(found.embedding, embedder.embed("a", "query", 8))
    with pytest.raises(InputError, match=r"truncate="):
        text.run("a " * 1000)
    with pytest.raises(InputError, match=r"truncate="):
        documents.run([Document(content="a " * 1000)])


@pytest.mark.parametrize(
    ("content", "meta", "embedded"),
    [
        ("a car", {"title": "Red", "year": 1999}, "Red | 1999 | a car"),
        ("a car", {"title": "Red"}, "Red | a car"),
        ("a car", {"title": None, "year": 0}, "0 | a car"),
        ("a car", {}, "a car"),
        (None, {"title": "Red"}, "Red | "),
        (None, {}, ""),
    ],
)
def test_fields_of_meta_go_before_the_content(
    embedder: Embedder, content: str | None, meta: dict[str, Any], embedded: str
) -> None:
    component = NpuDocumentEmbedder(
        embedder=embedder, meta_fields_to_embed=["title", "year"], embedding_separator=" | "
    )
    (found,) = component.run([Document(content=content, meta=meta)])["documents"]
    np.testing.assert_array_equal(found.embedding, embedder.embed(embedded, "passage"))


def test_pipelines_index_and_find_also_when_read_from_a_file(prompted_bundle: Path) -> None:
    store = InMemoryDocumentStore(embedding_similarity_function="cosine")
    index = Pipeline()
    index.add_component("embedder", NpuDocumentEmbedder(prompted_bundle, "emulated"))
    index.add_component("writer", DocumentWriter(store))
    index.connect("embedder.documents", "writer.documents")
    documents = [Document(content=text) for text in TEXTS]
    again = Pipeline.loads(index.dumps(), **TRUST)
    assert again.dumps() == index.dumps()
    index.run({"embedder": {"documents": documents}})
    search = Pipeline()
    search.add_component("embedder", NpuTextEmbedder(prompted_bundle, "emulated"))
    search.add_component("retriever", InMemoryEmbeddingRetriever(store))
    search.connect("embedder.embedding", "retriever.query_embedding")
    found = search.run({"embedder": {"text": TEXTS[2]}})["retriever"]["documents"]
    engine = api.shared(prompted_bundle, "emulated")
    cosines = engine.embed(TEXTS, "passage") @ engine.embed(TEXTS[2], "query")
    assert [d.content for d in found] == [TEXTS[i] for i in np.argsort(-cosines)]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (NpuTextEmbedder, {"query_prompt": "Other"}),
        (
            NpuDocumentEmbedder,
            {
                "document_prompt": "Other",
                "meta_fields_to_embed": ["title"],
                "embedding_separator": " ",
            },
        ),
    ],
)
def test_to_dict_and_pickle_keep_the_names(
    embedder: Embedder, prompted_bundle: Path, kind: Anything, options: dict[str, Any]
) -> None:
    made = kind(embedder=embedder, dim=8, truncate=False, **options)
    written = made.to_dict()
    assert written["init_parameters"] == {
        "bundle": str(prompted_bundle),
        "device": "emulated",
        "dim": 8,
        "truncate": False,
        **options,
    }
    for again in (kind.from_dict(written), pickle.loads(pickle.dumps(made))):
        assert again.to_dict() == written


def test_warm_up_opens_the_bundle_and_making_one_does_not(tiny_cls_bundle: Path) -> None:
    before = len(api._shared)
    for kind in (NpuTextEmbedder, NpuDocumentEmbedder):
        component = kind(tiny_cls_bundle, "emulated")
        assert len(api._shared) == before
        component.warm_up()
        assert len(api._shared) == before + 1
        api.shared(tiny_cls_bundle, "emulated").close()
        api._shared.popitem()


@pytest.mark.parametrize(
    ("documents", "words"),
    [
        ("a text", r"documents: str, wanted a list of Documents"),
        (["a text"], r"documents\[0\]: str, wanted a Document"),
        ([Document(content="a"), None], r"documents\[1\]: NoneType, wanted a Document"),
    ],
)
def test_what_is_no_document_is_named(embedder: Embedder, documents: Anything, words: str) -> None:
    with pytest.raises(InputTypeError, match=words):
        NpuDocumentEmbedder(embedder=embedder).run(documents)


def test_a_list_is_no_text(embedder: Embedder) -> None:
    with pytest.raises(InputTypeError, match=r"text: list, wanted str"):
        NpuTextEmbedder(embedder=embedder).run(["a"])  # type: ignore[arg-type]
