"""What the adapters' tests share: a bundle whose queries and documents have prompts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before ray is imported: its processes listen and call each other on the loopback address only.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")

from bundle_edits import edited

from npu_embed import Embedder, api

# "Other" is for the tests that name a prompt; the first two are found by what they are for.
PROMPTS = {"query": "find: ", "passage": "found: ", "Other": "other: "}


@pytest.hookimpl(tryfirst=True)  # before slow ones are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this folder as slow: to import the frameworks takes seconds."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_reported() -> Iterator[None]:
    """No framework sends anything anywhere from a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANONYMIZED_TELEMETRY", "False")  # Chroma
        patch.setenv("HAYSTACK_TELEMETRY_ENABLED", "False")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("LANGSMITH_TRACING", "false")
        yield


@pytest.fixture(scope="session")
def prompted_bundle(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny BERT's bundle with PROMPTS."""
    records = "".join(f"prompt {n} {text.encode().hex()}\n" for n, text in PROMPTS.items())
    folder = tmp_path_factory.mktemp("prompted") / "bundle"
    return edited(tiny_bundle, folder, ("param stages ", f"{records}param stages "))


@pytest.fixture(scope="module")
def embedder(prompted_bundle: Path) -> Iterator[Embedder]:
    """What the adapters must agree with."""
    with Embedder(prompted_bundle, "emulated") as opened:
        yield opened


@pytest.fixture(scope="module", autouse=True)
def _nothing_stays_open() -> Iterator[None]:
    """Close what adapters that name a bundle have opened."""
    yield
    for opened in api._shared.values():
        opened.close()
    api._shared.clear()
