"""MTEB's encoder, with mteb itself where it is installed: it brings torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

WHY = "an evaluation needs mteb and torch: pip install 'npu-embed[mteb]'"
mteb = pytest.importorskip("mteb", reason=WHY)
pytest.importorskip("torch", reason=WHY)

from mteb.mocks.mock_tasks.retrieval import MockRetrievalTask  # noqa: E402
from mteb.mocks.mock_tasks.sts import MockSTSTask  # noqa: E402
from mteb.models.models_protocols import EncoderProtocol  # noqa: E402
from mteb.types import PromptType  # noqa: E402

from npu_embed import Embedder, InputError  # noqa: E402
from npu_embed.driver import Xrt as Anything  # noqa: E402
from npu_embed.integrations.mteb import NpuEncoder  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of torch, datasets and scikit-learn
]

TEXTS = ["two cats on a sofa", "a", "a red car"]
BATCHES = [{"text": TEXTS[:2]}, {"text": TEXTS[2:]}]


def encode(encoder: NpuEncoder, kind: PromptType | None, task: Anything = MockSTSTask) -> Anything:
    """The vectors of TEXTS in two batches."""
    return encoder.encode(
        BATCHES,
        task_metadata=task().metadata,
        hf_split="test",
        hf_subset="default",
        prompt_type=kind,
        batch_size=2,
    )


def test_it_is_an_encoder(prompted_bundle: Path) -> None:
    encoder = NpuEncoder(prompted_bundle, "emulated", dim=16)
    assert isinstance(encoder, EncoderProtocol)
    meta = encoder.mteb_model_meta
    assert meta is not None
    assert meta.name == "npu-embed/tiny-bert"
    assert (meta.max_tokens, meta.embed_dim) == (128, 16)


@pytest.mark.parametrize(
    ("kind", "prompt"),
    [(PromptType.query, "query"), (PromptType.document, "passage"), (None, None)],
)
def test_queries_and_documents_have_the_bundles_prompts(
    embedder: Embedder, kind: PromptType | None, prompt: str | None
) -> None:
    encoder = NpuEncoder(embedder=embedder)
    np.testing.assert_array_equal(encode(encoder, kind), embedder.embed(TEXTS, prompt))


def test_a_prompt_of_the_tasks_type_goes_first(embedder: Embedder) -> None:
    encoder = NpuEncoder(embedder=embedder)
    other = MockSTSTask.metadata.model_copy(update={"type": "Other"})

    class Task:
        metadata = other

    found = encode(encoder, PromptType.query, Task)
    np.testing.assert_array_equal(found, embedder.embed(TEXTS, "Other"))


def test_the_options_arrive(embedder: Embedder) -> None:
    encoder = NpuEncoder(embedder=embedder, document_prompt="Other", dim=8, truncate=False)
    found = encode(encoder, PromptType.document)
    np.testing.assert_array_equal(found, embedder.embed(TEXTS, "Other", 8))
    with pytest.raises(InputError, match=r"truncate="):
        encoder.encode(
            [{"text": ["a " * 1000]}],
            task_metadata=MockSTSTask.metadata,
            hf_split="test",
            hf_subset="default",
        )


def test_another_bundle_has_another_revision(
    prompted_bundle: Path, tiny_bundle: Path, embedder: Embedder
) -> None:
    encoders = [
        NpuEncoder(embedder=embedder),
        NpuEncoder(tiny_bundle, "emulated"),
        NpuEncoder(prompted_bundle, "emulated", dim=8),
    ]
    metas = [encoder.mteb_model_meta for encoder in encoders]
    assert len({meta.revision for meta in metas if meta is not None}) == 3


@pytest.mark.parametrize("task", [MockSTSTask, MockRetrievalTask])
def test_tasks_are_evaluated(embedder: Embedder, task: Anything) -> None:
    results = mteb.evaluate(NpuEncoder(embedder=embedder), [task()], cache=None)
    (result,) = results.task_results
    assert np.isfinite(result.get_score())
    assert results.model_name == "npu-embed/tiny-bert"
