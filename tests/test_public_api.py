"""What `import npu_embed` gives, and what it costs."""

from __future__ import annotations

import inspect
import json
import resource
import subprocess
import sys
import types
from pathlib import Path

import pytest

import npu_embed
from npu_embed import errors

ROOT = Path(__file__).parent.parent
MAX_IMPORT_CPU_SECONDS = 0.5
PUBLIC = [getattr(npu_embed, name) for name in npu_embed.__all__ if name != "__version__"]


def test_all_is_the_truth() -> None:
    public = {
        name
        for name, value in vars(npu_embed).items()
        if not name.startswith("_")
        and not isinstance(value, types.ModuleType)
        and name != "annotations"  # of __future__
    }
    # `export` is also a package: what was imported decides which of both the name is bound to.
    assert {*public, "__version__", "export"} == set(npu_embed.__all__)
    assert npu_embed.__all__ == sorted(npu_embed.__all__)


def test_every_name_can_be_had_by_a_star_import() -> None:
    names: dict[str, object] = {}
    exec("from npu_embed import *", names)
    assert set(npu_embed.__all__) <= set(names)


@pytest.mark.parametrize("value", PUBLIC, ids=lambda v: v.__name__)
def test_every_public_name_says_what_it_is(value: type) -> None:
    assert inspect.getdoc(value)
    if inspect.isclass(value) and not issubclass(value, Exception):
        for name, member in vars(value).items():
            if not name.startswith("_") and (callable(member) or isinstance(member, property)):
                assert inspect.getdoc(member), f"{value.__name__}.{name}"


def test_every_error_is_in_one_tree() -> None:
    tree = {n for n, v in vars(errors).items() if inspect.isclass(v)}
    assert tree <= set(npu_embed.__all__)
    assert all(issubclass(getattr(npu_embed, name), npu_embed.NpuEmbedError) for name in tree)


def test_the_version_is_a_str() -> None:
    assert isinstance(npu_embed.__version__, str)
    assert npu_embed.__version__[0].isdigit()


def test_an_import_is_light() -> None:
    heavy = ["click", "rich", "torch", "npu_embed.cli", "npu_embed.exporters", "npu_embed.fetch"]
    program = (
        f"import json, sys, npu_embed; print(json.dumps([m for m in {heavy} if m in sys.modules]))"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert json.loads(done.stdout) == []
    assert done.stderr == ""
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert cpu < MAX_IMPORT_CPU_SECONDS
