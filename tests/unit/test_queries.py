"""Queries, documents, and sentence-transformers' names for embedding."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from bundle_edits import edited
from references import UNIT_TOLERANCE

from npu_embed import Embedder, InputError, InputTypeError, queries
from npu_embed.driver import Xrt as Anything

TEXTS = ["two cats on a sofa", "a", "a red car"]
PROMPTS = {"query": "find: ", "passage": "found: ", "Other": "other: "}

Open = Callable[..., Embedder]


@pytest.fixture
def open_with(tiny_bundle: Path, tmp_path: Path) -> Iterator[Open]:
    """Opens the tiny bundle with these prompts."""
    opened: list[Embedder] = []

    def made(default: str | None = None, **prompts: str) -> Embedder:
        lines = "".join(f"prompt {name} {text.encode().hex()}\n" for name, text in prompts.items())
        if default is not None:
            lines += f"param default_prompt {default}\n"
        folder = tmp_path / f"bundle{len(opened)}"
        bundle = edited(tiny_bundle, folder, ("param stages ", f"{lines}param stages "))
        opened.append(Embedder(bundle, "emulated"))
        return opened[-1]

    yield made
    for embedder in opened:
        embedder.close()


def typed(embedder: Embedder, prefix: str) -> Anything:
    """The vectors of the texts with something typed before each."""
    return embedder.encode([prefix + text for text in TEXTS], prompt="")


def test_a_query_and_a_document_have_their_prompts(open_with: Open) -> None:
    e = open_with(**PROMPTS)
    query, document = e.embed_query(TEXTS), e.embed_document(TEXTS)
    np.testing.assert_array_equal(query, typed(e, "find: "))
    np.testing.assert_array_equal(document, typed(e, "found: "))
    assert np.abs(query - document).max() > 1e-3
    np.testing.assert_array_equal(e.embed(TEXTS, prompt="query"), query)


def test_document_goes_before_passage_and_passage_before_corpus(open_with: Open) -> None:
    for names, wanted in (
        (("corpus", "passage", "document"), "document"),
        (("corpus", "passage"), "passage"),
        (("corpus",), "corpus"),
    ):
        e = open_with(**{name: f"{name}: " for name in names})
        np.testing.assert_array_equal(e.embed_document(TEXTS), typed(e, f"{wanted}: "))


def test_a_str_gives_a_vector_and_dim_cuts_it(open_with: Open) -> None:
    e = open_with(**PROMPTS)
    for method in (e.embed_query, e.embed_document):
        vector = method(TEXTS[0], dim=10)
        assert vector.shape == (10,)
        np.testing.assert_array_equal(vector, method([TEXTS[0]], 10)[0])
        with pytest.raises(InputError, match="truncate=True"):
            method("cats " * 500, truncate=False)


def test_without_such_a_prompt_texts_go_without_one_and_that_is_said_once(
    open_with: Open, caplog: pytest.LogCaptureFixture
) -> None:
    e = open_with(default="SearchQuery", SearchQuery="find: ", Document="found: ")
    with caplog.at_level(logging.WARNING, "npu_embed"):
        query, document = e.embed_query(TEXTS), e.embed_document(TEXTS)
        e.embed_query(TEXTS)
    np.testing.assert_array_equal(query, typed(e, ""))
    np.testing.assert_array_equal(query, document)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "no prompt named query, so texts go without one; it has Document, SearchQ" in said[0]
    assert "no prompt named document or passage or corpus" in said[1]


def test_a_model_without_prompts_needs_none(
    open_with: Open, caplog: pytest.LogCaptureFixture
) -> None:
    e = open_with()
    np.testing.assert_array_equal(e.embed_query(TEXTS), e.embed(TEXTS))
    np.testing.assert_array_equal(e.embed_document(TEXTS), e.embed(TEXTS))
    assert not caplog.records


def test_encode_takes_a_prompt_by_name_or_by_text_and_the_text_goes_first(open_with: Open) -> None:
    e = open_with(default="Other", **PROMPTS)
    np.testing.assert_array_equal(e.encode(TEXTS), e.embed(TEXTS))
    np.testing.assert_array_equal(e.encode(TEXTS), typed(e, "other: "))
    np.testing.assert_array_equal(e.encode(TEXTS, prompt_name="query"), typed(e, "find: "))
    np.testing.assert_array_equal(e.encode(TEXTS, prompt="my: "), typed(e, "my: "))
    both = e.encode(TEXTS, prompt_name="query", prompt="my: ")
    np.testing.assert_array_equal(both, typed(e, "my: "))


def test_encode_query_and_encode_document_are_the_same_by_other_names(open_with: Open) -> None:
    e = open_with(**PROMPTS)
    np.testing.assert_array_equal(e.encode_query(TEXTS), e.embed_query(TEXTS))
    np.testing.assert_array_equal(e.encode_document(TEXTS), e.embed_document(TEXTS))
    for method in (e.encode_query, e.encode_document):
        np.testing.assert_array_equal(method(TEXTS, prompt_name="Other"), typed(e, "other: "))
        np.testing.assert_array_equal(method(TEXTS, prompt="my: "), typed(e, "my: "))
        assert method(TEXTS[0], truncate_dim=7).shape == (7,)


@pytest.mark.parametrize("method", ["encode", "encode_query", "encode_document"])
def test_the_options_of_sentence_transformers_that_change_nothing_are_taken(
    open_with: Open, method: str
) -> None:
    encode = getattr(open_with(**PROMPTS), method)
    found = encode(
        sentences=TEXTS,
        batch_size=1,
        show_progress_bar=True,
        output_value="sentence_embedding",
        precision="float32",
        convert_to_numpy=True,
        convert_to_tensor=False,
        device=None,
        normalize_embeddings=True,
        truncate_dim=None,
    )
    np.testing.assert_allclose(found, encode(TEXTS), rtol=0, atol=1e-7)


@pytest.mark.parametrize("texts", [TEXTS, TEXTS[0]])
def test_normalize_embeddings_makes_unit_rows_of_any_model(
    tiny_bundle: Path, tmp_path: Path, texts: Anything
) -> None:
    changes = (("param normalize 1", "param normalize 0"), ("pooling,normalize", "pooling"))
    with Embedder(edited(tiny_bundle, tmp_path / "b", *changes), "emulated") as e:
        found = e.encode(texts, normalize_embeddings=True)
        lengths = np.linalg.norm(np.atleast_2d(e.encode(texts)), axis=1)
    assert np.abs(lengths - 1).min() > 0.1
    assert found.ndim == np.ndim(texts) + 1
    assert np.abs(np.linalg.norm(np.atleast_2d(found), axis=1) - 1).max() < UNIT_TOLERANCE


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (
            {"prompt_name": "q"},
            InputError,
            "unknown prompt, this bundle has: Other, passage, query",
        ),
        ({"prompt": 3}, InputTypeError, "prompt: int, wanted str"),
        ({"prompt": "\ud800"}, InputError, r"prompt: lone surrogate U\+D800"),
        ({"batch_size": 0}, InputError, "batch_size=0: wanted at least 1"),
        ({"batch_size": "all"}, InputTypeError, "batch_size='all': str, wanted an integer"),
        ({"truncate_dim": 65}, InputError, "dim=65: wanted 1 to 64"),
        ({"convert_to_tensor": True}, InputError, "wanted False; pass the result to torch"),
        ({"convert_to_numpy": False}, InputError, "wanted True; convert the result"),
        ({"output_value": "token_embeddings"}, InputError, "wanted 'sentence_embedding'; there"),
        ({"precision": "int8"}, InputError, "wanted 'float32'; quantize the result"),
        ({"device": "cuda"}, InputError, "wanted None; choose the device when the Embedder"),
        ({"pool": None}, InputTypeError, r"encode\(pool=...\): unknown option; wanted prompt_name"),
    ],
)
@pytest.mark.parametrize("method", ["encode", "encode_query", "encode_document"])
def test_what_would_not_be_done_is_refused(
    open_with: Open, method: str, options: Anything, error: type[Exception], words: str
) -> None:
    e = open_with(**PROMPTS)
    with pytest.raises(error, match=words):
        getattr(e, method)(TEXTS, **options)


def test_an_unknown_prompt_of_embed_lists_the_names(open_with: Open) -> None:
    with pytest.raises(InputError, match="unknown prompt, this bundle has: Other, passage, query"):
        open_with(**PROMPTS).embed(TEXTS, prompt="q")


def test_every_method_says_what_it_gives() -> None:
    for name, method in inspect.getmembers(queries.Queries, inspect.isfunction):
        assert inspect.getdoc(method), name


def test_an_array_as_an_option_is_refused_like_any_other_value(tiny_bundle: Path) -> None:
    with Embedder(tiny_bundle, device="emulated") as e, pytest.raises(InputError, match="float32"):
        e.encode("a", precision=np.zeros(3))
