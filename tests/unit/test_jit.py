"""When compiled kernels are loaded, and that a process lives well without them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from npu_embed import jit
from npu_embed.jit.lanes import LANES, sum_lanes

ROOT = Path(__file__).parents[2]


def run(code: str, compiled: str = "auto") -> subprocess.CompletedProcess[str]:
    """Python code in a process of its own."""
    environment = {"PATH": "/usr/bin", "PYTHONPATH": str(ROOT), "NPU_EMBED_COMPILED": compiled}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_lanes_are_summed_from_the_left_and_then_by_halves() -> None:
    x = np.random.default_rng(0).standard_normal((5, 3 * LANES)).astype(np.float32)
    for row, found in zip(x, sum_lanes(x), strict=True):
        lanes = [(row[j] + row[j + LANES]) + row[j + 2 * LANES] for j in range(LANES)]
        while len(lanes) > 1:
            half = len(lanes) // 2
            lanes = [lanes[i] + lanes[i + half] for i in range(half)]
        assert found[0] == lanes[0]


def test_numba_is_not_imported_for_a_little_work() -> None:
    code = (
        "import sys; from npu_embed import jit; jit.note_rows(jit.WARM_ROWS - 1);"
        "assert jit._loader.thread is None; assert 'numba' not in sys.modules"
    )
    assert run(code).returncode == 0


@pytest.mark.slow  # imports numba
def test_much_work_loads_them_in_a_thread_and_the_process_ends_cleanly() -> None:
    pytest.importorskip("numba", reason="numba is not installed: nothing is compiled")
    code = (
        "from npu_embed import jit; jit.note_rows(jit.WARM_ROWS);"
        "jit._loader.thread.join(); assert jit.kernels.round_rows"
    )
    done = run(code)
    assert (done.returncode, done.stderr) == (0, "")
    # And where it ends while they are being loaded.
    done = run("from npu_embed import jit; jit.note_rows(jit.WARM_ROWS)")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("compiled", "before"), [("off", ""), ("auto", "import sys; sys.modules['numba'] = None;")]
)
def test_without_them_numpy_computes(compiled: str, before: str) -> None:
    code = f"{before}from npu_embed import jit; assert not jit.load(); assert jit.kernels is None"
    done = run(code, compiled)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_a_child_forked_while_they_load_computes_with_numpy() -> None:
    code = """
import os, threading
from npu_embed import jit
meet = threading.Event()
jit._loader._load = meet.wait  # a load that goes on for ever
jit._loader.start()
child = os.fork()
if child == 0:
    jit.note_rows(10**6)
    os._exit(0 if not jit.load() else 1)
code = os.waitpid(child, 0)[1]
meet.set()
raise SystemExit(code)
"""
    done = run(code)
    assert done.returncode == 0, done.stderr


def test_what_is_loaded_is_every_kernel(compiled_kernels: object) -> None:
    from npu_embed.jit import scalars

    assert all(function.signatures for function, _ in scalars.declared)
    names = {function.py_func.__name__ for function, _ in scalars.declared}
    assert names <= set(dir(compiled_kernels))
    assert jit.kernels is None


@pytest.mark.usefixtures("compiled_kernels")
def test_machine_code_is_kept_under_the_content_of_all_sources(tmp_path: Path) -> None:
    from npu_embed.jit import scalars

    names = {function.py_func.__qualname__ for function, _ in scalars.declared}
    assert all(name.endswith(scalars.version()) for name in names)
    for source in Path(scalars.__file__).parent.glob("*.py"):
        (tmp_path / source.name).write_bytes(source.read_bytes())
    assert scalars.version(tmp_path) == scalars.version()
    (tmp_path / "sums.py").write_text("")
    assert scalars.version(tmp_path) != scalars.version()
