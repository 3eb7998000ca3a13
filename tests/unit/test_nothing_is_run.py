"""Nothing of a bundle, a checkpoint or a stranger's file is executed, imported or unpickled."""

from __future__ import annotations

import ast
import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from references import TINY

ROOT = Path(__file__).parents[2] / "npu_embed"

RUNS_CODE = {"eval", "exec", "compile", "__import__", "run_path", "run_module"}
UNPICKLES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
READS_PICKLES = {"load", "loads", "Unpickler"}  # of numpy, torch and the above

# What the server's own worker process says, through a pipe that only the two have.
MAY_NAME_PICKLE = {"server/link.py"}


def offences(file: Path) -> Iterator[str]:
    """What a source does that could run a stranger's bytes."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [getattr(node, "module", "") or "", *(alias.name for alias in node.names)]
            yield from (f"imports {name}" for name in names if name.split(".")[0] in UNPICKLES)
        elif isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name) and called.id in RUNS_CODE:
                yield f"calls {called.id}"
            elif isinstance(called, ast.Attribute):
                of = called.value.id if isinstance(called.value, ast.Name) else ""
                if of in {"np", "torch", *UNPICKLES} and called.attr in READS_PICKLES:
                    yield f"calls {of}.{called.attr}"
                if called.attr == "import_module" and not isinstance(node.args[0], ast.Constant):
                    yield "imports what is not named in the source"
            yield from (
                f"passes {word.arg}"
                for word in node.keywords
                if word.arg in ("shell", "allow_pickle", "trust_remote_code")
            )


def test_no_source_has_the_means() -> None:
    files = sorted(ROOT.rglob("*.py"))
    assert len(files) > 100
    found = {f.relative_to(ROOT).as_posix(): list(offences(f)) for f in files}
    for name in MAY_NAME_PICKLE:
        assert found.pop(name) == ["imports pickle"]
    assert {name: what for name, what in found.items() if what} == {}


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("eval(text)", "calls eval"),
        ("import pickle", "imports pickle"),
        ("from joblib import load", "imports joblib"),
        ("np.load(path)", "calls np.load"),
        ("torch.load(path)", "calls torch.load"),
        ("importlib.import_module(name)", "imports what is not named in the source"),
        ("subprocess.run(text, shell=True)", "passes shell"),
        ("AutoModel.from_pretrained(x, trust_remote_code=True)", "passes trust_remote_code"),
    ],
)
def test_what_is_looked_for_is_found(tmp_path: Path, source: str, told: str) -> None:
    file = tmp_path / "source.py"
    file.write_text(source)
    assert told in list(offences(file))


# Whoever is unpickled writes his name; whoever starts a process or unpickles is told of.
WATCHED = ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen")
CHILD = f"""
import json, logging, sys
from pathlib import Path
import npu_embed
from npu_embed.exporters import export_checkpoint
from npu_embed.quantization import bundle_ranges
seen = []
sys.addaudithook(lambda event, args: seen.append(event) if event in {WATCHED} else None)
logging.disable()
bundles, checkpoints = json.loads(sys.argv[1]), json.loads(sys.argv[2])
refused = 0
for bundle in bundles:
    try:
        with npu_embed.Embedder(bundle, device="emulated") as embedder:
            embedder.embed("two cats")
            bundle_ranges(Path(bundle))
    except npu_embed.NpuEmbedError:
        refused += 1
for checkpoint in checkpoints:
    try:
        export_checkpoint(checkpoint, checkpoint + ".out")
    except npu_embed.NpuEmbedError:
        refused += 1
print(json.dumps([refused, seen]))
"""


class Intruder:
    """Unpickled, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.mark), "w")


@pytest.mark.slow
def test_a_pickle_in_the_place_of_any_file_is_not_unpickled(
    tiny_bundle: Path, tmp_path: Path
) -> None:
    mark = tmp_path / "unpickled"
    evil = pickle.dumps(Intruder(mark))
    pickle.loads(evil).close()
    assert mark.exists(), "the pickle does what it is for"
    mark.unlink()
    bundles, checkpoints = [], []
    for file in ("manifest.txt", "tensors.safetensors", "tokenizer.json", "kernels/gemm.xclbin"):
        bundles.append(Path(shutil.copytree(tiny_bundle, tmp_path / f"bundle-{Path(file).name}")))
        (bundles[-1] / file).write_bytes(evil)
    bundles.append(Path(shutil.copytree(tiny_bundle, tmp_path / "ranges")))
    with (bundles[-1] / "int8_ranges.npy").open("wb") as ranges:
        np.save(ranges, np.array([Intruder(mark)], object), allow_pickle=True)
    for file in ("config.json", "model.safetensors", "tokenizer.json", "pytorch_model.bin"):
        checkpoints.append(Path(shutil.copytree(TINY, tmp_path / f"checkpoint-{file}")))
        (checkpoints[-1] / file).write_bytes(evil)
    (checkpoints[-1] / "model.safetensors").unlink()
    # A module of the checkpoint's own, as Hugging Face runs them where it is told to trust them.
    checkpoints.append(Path(shutil.copytree(TINY, tmp_path / "modules")))
    (checkpoints[-1] / "custom.py").write_text(f"open({str(mark)!r}, 'w')")
    modules = json.loads((checkpoints[-1] / "modules.json").read_text())
    modules[0]["type"] = "custom.Module"
    (checkpoints[-1] / "modules.json").write_text(json.dumps(modules))
    given = [json.dumps([str(path) for path in paths]) for paths in (bundles, checkpoints)]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *given], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [len(bundles) + len(checkpoints), []]
    assert not mark.exists()
