"""A bundle's kernels with buffers to run them on, bundles of many contexts, other processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from npu_embed.bundle import Bundle
from npu_embed.device import Buffer, Session
from npu_embed.npu import Npu
from npu_embed.rows import Rows
from npu_embed.runs import GemmRun, MhaRun

F32 = NDArray[np.float32]

HEADS, HEAD_DIM, HIDDEN, INNER = 4, 16, 64, 160
ROWS = 256
LAYER = "encoder.layer.0"
GEMMS = ("qkv", "o", "up", "down")


def numbers(rows: int, width: int, seed: int = 0) -> F32:
    """Some numbers to compute with."""
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)


class Rig:
    """The tiny bundle's kernels with buffers of 256 rows."""

    def __init__(self, path: Path, **npu: str) -> None:
        self.bundle = Bundle.open(path)
        self.session = Session.open("emulated")
        self.npu = Npu(self.session, self.bundle, **npu)
        gemms = self.bundle.specs.gemms
        self.x = Rows(self.session, ROWS, gemms["qkv"].lda)
        self.qkv = Rows(self.session, ROWS, gemms["qkv"].c_stride)
        self.o = Rows(self.session, ROWS, gemms["o"].lda)
        self.out = Rows(self.session, ROWS, gemms["o"].c_stride)
        self.inner = Rows(self.session, ROWS, gemms["up"].c_stride)
        self.weights = {key: self._packed(key) for key in GEMMS}
        self.x.put(numbers(ROWS, HIDDEN))
        self.qkv.put(numbers(ROWS, 3 * HIDDEN, seed=1))

    def _packed(self, key: str) -> Buffer:
        data = self.bundle.tensors.raw(f"{LAYER}.{key}.packed")
        buffer = self.session.buffer(data.nbytes)
        buffer.host[:] = data
        buffer.to_device(0, data.nbytes)
        return buffer

    def gemm_run(self, key: str = "qkv", rows: int = 3) -> GemmRun:
        """A GEMM as a layer runs it: up and down follow each other."""
        a, c = {
            "qkv": (self.x, self.qkv),
            "o": (self.x, self.out),
            "up": (self.x, self.inner),
            "down": (self.inner, self.out),
        }[key]
        return GemmRun(key, a, self.weights[key], c, rows)

    def gemm(self, rows: int = 3, key: str = "qkv") -> F32:
        """The results of a GEMM run by itself."""
        run = self.gemm_run(key, rows)
        self.npu.run_gemm(key, run.a, 0, run.w, run.c, rows)
        return run.c.get(rows)

    def mha(self, rows: int = 3, window: int | None = None, row: int = 0) -> F32:
        """The results of one attention."""
        self.npu.run_mha(self.qkv, self.o, rows, window, row)
        return self.o.get(rows, row=row)

    def mha_runs(self, *lengths: int) -> list[MhaRun]:
        """Attentions of texts that stand one after another."""
        starts = np.cumsum([0, *lengths])
        return [
            MhaRun(self.qkv, self.o, n, row=int(row))
            for n, row in zip(lengths, starts, strict=False)
        ]

    def attend(self, *lengths: int) -> F32:
        """The results of attentions of texts that stand one after another, in one submit."""
        self.npu.submit(self.mha_runs(*lengths)).wait()
        return self.o.get(sum(lengths))

    def use(self, place: str) -> None:
        """Run something in the context that has a GEMM's key, or `mha`."""
        if place == "mha":
            self.mha()
        else:
            self.gemm(key=place)

    def kernels(self) -> set[str]:
        """The names of the loaded kernels."""
        return {name for names in self.npu.loaded().values() for name in names}

    def contexts(self) -> set[str]:
        """The names of the loaded contexts' files."""
        return {Path(file).stem for file in self.npu.loaded()}


def split_gemms(bundle: Path) -> Path:
    """Give every GEMM an xclbin file of its own: five contexts with attention's."""
    manifest = bundle / "manifest.txt"
    text = manifest.read_text()
    records = ""
    for key in GEMMS:
        shutil.copy(bundle / "kernels/gemm.xclbin", bundle / f"kernels/{key}.xclbin")
        records += f"\nxclbin {key} kernels/{key}.xclbin MLIR_AIE"
        text = text.replace(f"gemm {key} ctx=gemm", f"gemm {key} ctx={key}")
    manifest.write_text(text.replace("\nxclbin mha", records + "\nxclbin mha"))
    return bundle


HOLDER = """
import sys
from npu_embed.emulator import pyxrt
device = pyxrt.device(0)
xclbin = pyxrt.xclbin(sys.argv[1])
device.register_xclbin(xclbin)
kept = [pyxrt.hw_context(device, xclbin.get_uuid()) for _ in range(int(sys.argv[2]))]
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def another_process(program: str, *args: object) -> Iterator[subprocess.Popen[str]]:
    """A process that runs a program, told to end by the end of its stdin."""
    root = Path(__file__).parents[1]
    with subprocess.Popen(
        [sys.executable, "-c", program, *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def held(bundle: Path, contexts: int) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds hardware contexts and stands in no line."""
    with another_process(HOLDER, bundle / "kernels/gemm.xclbin", contexts) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        yield holder


# --- fixtures -----------------------------------------------------------------------------------

Slots = Callable[[int], None]
MakeRig = Callable[..., Rig]


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> Slots:
    """Sets the number of the emulated NPU's slots, for what is opened afterwards."""
    return lambda n: monkeypatch.setenv("NPU_EMBED_EMU_SLOTS", str(n))


@pytest.fixture
def make() -> Iterator[MakeRig]:
    """Makes rigs whose slots are free again after the test, however it ends."""
    with ExitStack() as stack:

        def made(path: Path, **options: str) -> Rig:
            rig = Rig(path, **options)
            stack.callback(rig.npu.close)
            return rig

        yield made


@pytest.fixture
def rig(make: MakeRig, tiny_bundle: Path) -> Rig:
    """The tiny bundle's kernels, two contexts."""
    return make(tiny_bundle)


@pytest.fixture(scope="session")
def split_bundle(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny bundle with five contexts, only to be read."""
    return split_gemms(Path(shutil.copytree(tiny_bundle, tmp_path_factory.mktemp("split") / "b")))
