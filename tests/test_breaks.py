"""Breaking things on purpose: each break is a typed error or a vector that is plainly wrong.

What must never happen is a break that nobody sees: a result that looks right, or an exception
that is not this package's own.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from references import MIN_COSINE, TINY, check_vectors, cosines, load_references, stored_references

from npu_embed import BundleError, DeviceBad, Embedder, NpuEmbedError
from npu_embed.buffers import Buffer, View
from npu_embed.driver import Xrt
from npu_embed.emulator import txn
from npu_embed.flights import Flight
from npu_embed.kernels import Kernel
from npu_embed.npu import Npu
from npu_embed.rows import Rows
from npu_embed.runs import MhaRun, Run

# Of unequal length, none as long as its bucket, in all more than 48 of a chunk's 64 rows: every
# core row has work, and whatever a break reads too much is not a text's own.
TEXTS = (
    "ALL CAPS SHOUTING AND lower whispering",
    "a",
    "numbers 3.14159, 1,000,000 and 0xDEADBEEF",
    "How do I reset my password?",
)


def embed(bundle: Path) -> tuple[np.ndarray, np.ndarray]:
    """The engine's vectors and their references."""
    stored = load_references(TINY)
    wanted = stored.embeddings[[stored.texts.index(text) for text in TEXTS]]
    with Embedder(bundle, "emulated") as embedder:
        return embedder.embed(TEXTS), wanted


def embed_stored(bundle: Path) -> tuple[np.ndarray, np.ndarray]:
    """The engine's vectors of the bundle's own reference texts, and those references."""
    stored = stored_references(bundle)
    with Embedder(bundle, "emulated") as embedder:
        return embedder.embed(stored.texts), stored.embeddings


def check_seen(
    bundle: Path, vectors: Callable[[Path], tuple[np.ndarray, np.ndarray]] = embed
) -> None:
    """Fail if the vectors look right."""
    try:
        found, wanted = vectors(bundle)
    except NpuEmbedError:
        return
    assert cosines(found, wanted).min() < MIN_COSINE, "nobody would have seen this break"


@pytest.fixture(params=["on", "off"])
def _both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With runlists and without: each starts its runs by other calls."""
    monkeypatch.setenv("NPU_EMBED_RUNLISTS", request.param)


both_ways = pytest.mark.usefixtures("_both_ways")


@both_ways
def test_unbroken_is_right(tiny_bundle: Path) -> None:
    check_vectors(*embed(tiny_bundle))
    with Embedder(tiny_bundle, "emulated") as embedder:
        lengths = [len(ids) for ids in embedder.tokenize(TEXTS)]
    assert 48 < sum(lengths) < 64
    assert not set(lengths) & {16, 32, 64}


# --- words --------------------------------------------------------------------------------------


def _edit_words(bundle: Path, key: str, change: Callable[[list[int]], list[int]]) -> None:
    manifest = bundle / "manifest.txt"

    def edit(found: re.Match[str]) -> str:
        return f"{key}={','.join(map(str, change([int(w) for w in found[1].split(',')])))}"

    text, count = re.subn(rf"{key}=([\d,]+)", edit, manifest.read_text())
    assert count
    manifest.write_text(text)


@pytest.mark.slow
@both_ways
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda words: [w + 1 for w in words], id="all one up"),
        pytest.param(lambda words: [w - 1 for w in words], id="all one down"),
        pytest.param(lambda words: [words[0] + 1, *words[1:]], id="first one up"),
        pytest.param(lambda words: [words[0] - 1, *words[1:]], id="first one down"),
        pytest.param(lambda words: [*words[:-1], words[-1] - 1], id="last one down"),
        pytest.param(lambda words: [w + 6 for w in words], id="all at the next op"),
        pytest.param(lambda words: words[1:], id="first left out"),
    ],
)
def test_a_kv_word_in_the_wrong_place(
    tiny_copy: Path, change: Callable[[list[int]], list[int]]
) -> None:
    _edit_words(tiny_copy, "kv_words", change)
    check_seen(tiny_copy)


@both_ways
def test_window_words_one_up(tiny_copy: Path) -> None:
    _edit_words(tiny_copy, "win_words", lambda words: [w + 1 for w in words])
    check_seen(tiny_copy)


@both_ways
@pytest.mark.parametrize("off", [-1, 1])
def test_one_key_too_few_or_too_many(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, off: int
) -> None:
    real = Kernel.patch

    def patch(self: Kernel, words: Mapping[int, int]) -> None:
        kv = min(words.values())
        real(self, {word: kv + off if value == kv else value for word, value in words.items()})

    monkeypatch.setattr(Kernel, "patch", patch)
    check_seen(tiny_bundle)


@both_ways
def test_a_patch_left_out(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kernel, "patch", lambda self, words: None)
    check_seen(tiny_bundle)


# --- syncs --------------------------------------------------------------------------------------

SITES = [
    ("to_device", "npu_embed.rows", "send"),
    ("from_device", "npu_embed.rows", "receive"),
    ("to_device", "npu_embed.kernels", "patch"),
    ("to_device", "npu_embed.device", "buffer"),  # columns that only pad are never written
    ("to_device", "npu_embed.device", "load"),
    ("to_device", "npu_embed.models.forward", "upload"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "module", "function"), SITES)
def test_a_forgotten_sync(
    narrow_bundle: Path, monkeypatch: pytest.MonkeyPatch, method: str, module: str, function: str
) -> None:
    check_vectors(*embed_stored(narrow_bundle))
    real = getattr(Buffer, method)
    forgotten = 0

    def sync(self: Buffer, offset: int, size: int) -> None:
        nonlocal forgotten
        caller = sys._getframe(1)
        if (caller.f_globals["__name__"], caller.f_code.co_name) == (module, function):
            forgotten += 1
        else:
            real(self, offset, size)

    monkeypatch.setattr(Buffer, method, sync)
    check_seen(narrow_bundle, embed_stored)
    assert forgotten


def test_every_call_of_a_sync_is_among_those_forgotten_here() -> None:
    """A file with a new one must be added to SITES."""
    package = Path(sys.modules["npu_embed"].__file__ or "").parent
    found = {
        (method, file.relative_to(package).as_posix())
        for file in package.rglob("*.py")
        for method in re.findall(r"\.(to_device|from_device)\(", file.read_text(encoding="utf-8"))
    }
    known = {
        (method, module.removeprefix("npu_embed.").replace(".", "/") + ".py")
        for method, module, _ in SITES
    }
    known.add(("to_device", "doctor/answers.py"))  # forgotten in unit/test_doctor_answers.py
    assert found == known


def test_a_sync_the_wrong_way_loses_what_the_device_wrote(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Rows.get

    def get(self: Rows, rows: int, cols: int | None = None) -> np.ndarray:
        self._buffer.to_device(0, rows * self.width * 2)
        return real(self, rows, cols)

    monkeypatch.setattr(Rows, "get", get)
    check_seen(tiny_bundle)


# --- arguments ----------------------------------------------------------------------------------


@pytest.mark.slow
@both_ways
@pytest.mark.parametrize("pair", [(0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("key", ["qkv", "o", "up", "down"])
def test_two_buffers_of_a_gemm_swapped(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, key: str, pair: tuple[int, int]
) -> None:
    _swap(monkeypatch, key, pair)
    check_seen(tiny_bundle)


@both_ways
@pytest.mark.parametrize("pair", [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)])
def test_two_buffers_of_attention_swapped(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, pair: tuple[int, int]
) -> None:
    _swap(monkeypatch, "mha_16", pair)
    check_seen(tiny_bundle)


def _swap(monkeypatch: pytest.MonkeyPatch, name: str, pair: tuple[int, int]) -> None:
    real = Kernel.build

    def build(self: Kernel, views: Sequence[View]) -> Xrt:
        swapped = list(views)
        if self.name == name:
            a, b = pair
            swapped[a], swapped[b] = swapped[b], swapped[a]
        return real(self, swapped)

    monkeypatch.setattr(Kernel, "build", build)


# --- streams ------------------------------------------------------------------------------------


def _edit_stream(path: Path, nth: int, change: Callable[[list[int]], None]) -> None:
    """Change the words of the nth buffer descriptor of a stream."""
    stream = txn.decode(path.read_bytes())
    ops = list(stream.ops)
    at = [i for i, op in enumerate(ops) if isinstance(op, txn.BlockWrite)][nth]
    descriptor = ops[at]
    assert isinstance(descriptor, txn.BlockWrite)
    words = list(descriptor.data)
    change(words)
    ops[at] = txn.block_write(descriptor.address, words)
    header = stream.header
    path.write_bytes(txn.assemble(ops, dev_gen=header.dev_gen, num_cols=header.num_cols).encode())


def _descriptors(bundle: Path, file: str) -> int:
    stream = txn.decode((bundle / "kernels" / file).read_bytes())
    return sum(isinstance(op, txn.BlockWrite) for op in stream.ops)


def _one_row_short(words: list[int]) -> None:
    words[0] -= (words[3] >> 20) or 32  # d0_size; a linear descriptor has none


def _rows_too_near(words: list[int]) -> None:
    words[4] -= 1  # d1_stride; its sizes and the length stay


@pytest.mark.slow
@pytest.mark.parametrize("file", ["qkv_x1", "o_x1", "up_x1", "down_x1", "mha_16"])
def test_a_descriptor_one_row_short(tiny_bundle: Path, tiny_copy: Path, file: str) -> None:
    count = _descriptors(tiny_bundle, f"{file}.insts.bin")
    assert count >= 6
    path = tiny_copy / "kernels" / f"{file}.insts.bin"
    whole = path.read_bytes()
    for nth in range(count):
        path.write_bytes(whole)
        _edit_stream(path, nth, _one_row_short)
        check_seen(tiny_copy)


@pytest.mark.slow
def test_a_descriptor_of_a_second_chunk_one_row_short(tiny_copy: Path) -> None:
    """The stream is refused, or its run never ends or ends in an error; the next run is right."""
    stored = load_references(TINY)
    path = tiny_copy / "kernels" / "qkv_x2.insts.bin"
    whole = path.read_bytes()
    ended = set()
    for nth in range(_descriptors(tiny_copy, path.name)):
        path.write_bytes(whole)
        _edit_stream(path, nth, _one_row_short)
        with Embedder(tiny_copy, "emulated") as embedder:
            assert 96 < sum(len(ids) for ids in embedder.tokenize(stored.texts[:8])) <= 128
            with pytest.raises(
                (DeviceBad, BundleError),
                match=r"qkv_x2: the run ended in (TIMEOUT|ERROR)|qkv_x2.insts.bin: reads \d+ bytes",
            ) as failed:
                embedder.embed(stored.texts[:8])
            ended.update(re.findall("TIMEOUT|ERROR", str(failed.value)))
            embedder.release()  # a device that failed twice is used again after this
            check_vectors(embedder.embed(stored.texts[:3]), stored.embeddings[:3])
    assert "TIMEOUT" in ended


@pytest.mark.slow
@pytest.mark.parametrize("file", ["qkv_x1", "mha_16"])
def test_rows_of_a_descriptor_one_word_too_near(
    tiny_bundle: Path, tiny_copy: Path, file: str
) -> None:
    path = tiny_copy / "kernels" / f"{file}.insts.bin"
    whole = path.read_bytes()
    stream = txn.decode(whole)
    ops = [op for op in stream.ops if isinstance(op, txn.BlockWrite)]
    strided = [nth for nth, op in enumerate(ops) if op.data[3] >> 20]
    assert strided
    for nth in strided:
        path.write_bytes(whole)
        _edit_stream(path, nth, _rows_too_near)
        check_seen(tiny_copy)


def test_an_op_left_out_of_a_stream(tiny_copy: Path) -> None:
    """Of each kind one: a run-time word, a descriptor, a patch, a push, a wait."""
    path = tiny_copy / "kernels" / "qkv_x1.insts.bin"
    stream = txn.decode(path.read_bytes())
    kinds = (txn.Write, txn.BlockWrite, txn.DdrPatch, txn.Sync)
    for kind in kinds:
        for nth in (0, -1):
            at = [i for i, op in enumerate(stream.ops) if isinstance(op, kind)][nth]
            ops = [op for i, op in enumerate(stream.ops) if i != at]
            header = stream.header
            path.write_bytes(
                txn.assemble(ops, dev_gen=header.dev_gen, num_cols=header.num_cols).encode()
            )
            check_seen(tiny_copy)


# --- the forward --------------------------------------------------------------------------------


@both_ways
def test_texts_of_a_pack_out_of_order(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket writes all its rows: a later text must run after an earlier one."""
    real, turned = Npu.submit, 0

    def submit(self: Npu, runs: Sequence[Run]) -> Flight:
        nonlocal turned
        if isinstance(runs[0], MhaRun):
            turned += 1
            runs = runs[::-1]
        return real(self, runs)

    monkeypatch.setattr(Npu, "submit", submit)
    check_seen(tiny_bundle)
    assert turned == 3


@both_ways
def test_a_gemm_before_the_one_it_reads_from(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, turned = Npu.submit, 0

    def submit(self: Npu, runs: Sequence[Run]) -> Flight:
        nonlocal turned
        if len(runs) == 2 and not isinstance(runs[0], MhaRun):
            turned += 1
            runs = runs[::-1]
        return real(self, runs)

    monkeypatch.setattr(Npu, "submit", submit)
    check_seen(tiny_bundle)
    assert turned


@pytest.mark.parametrize(
    "tensor",
    ["encoder.layer.1.qkv.packed", "encoder.layer.2.down.packed", "embeddings.LayerNorm.weight"],
)
def test_weights_of_zeros(tiny_copy: Path, tensor: str) -> None:
    from npu_embed.tensors import SAFETENSORS, open_tensors

    opened = open_tensors(tiny_copy)
    start = opened._entry(tensor).begin
    size = opened.raw(tensor).nbytes
    with (tiny_copy / SAFETENSORS).open("r+b") as file:
        file.seek(start)
        file.write(bytes(size))
    check_seen(tiny_copy)
