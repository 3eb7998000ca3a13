"""Known answers: right kernels pass, and one wrong number, key or window fails."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from npu_embed.bundle import Bundle
from npu_embed.device import Buffer, Session
from npu_embed.doctor import answers, runs
from npu_embed.doctor.answers import Answer, Heads, NoAnswer, gemm_answer, mha_answer
from npu_embed.doctor.known_kernels import write_known_kernels
from npu_embed.errors import RunFailed
from npu_embed.exporters.pack import pack_gemm
from npu_embed.npu import Npu
from npu_embed.rows import Rows

F32 = NDArray[np.float32]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The doctor's own kernels, only to be read."""
    return write_known_kernels(tmp_path_factory.mktemp("known") / "bundle", "npu2")


def gemm(path: Path) -> Answer:
    return gemm_answer(Session.open("emulated"), Bundle.open(path))


def mha(path: Path) -> Answer:
    return mha_answer(Session.open("emulated"), Bundle.open(path))


@pytest.mark.parametrize("fixture", ["tiny_bundle", "gemma3_bundle", "published_bundle"])
def test_the_kernels_of_bundles_give_the_known_answers(
    fixture: str, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(fixture)
    for answer in (gemm(path), mha(path)):
        assert answer.wrong == 0
        assert answer.numbers > 100
        assert answer.error <= answer.allowed


def test_the_doctors_own_kernels_give_them_on_both_generations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for target in ("npu1", "npu2"):
        monkeypatch.setenv("NPU_EMBED_EMU_PROFILE", target)
        path = write_known_kernels(tmp_path / target, target)
        assert (gemm(path).wrong, mha(path).wrong) == (0, 0)


def test_every_number_of_a_gemm_is_exact(known: Path) -> None:
    assert (gemm(known).error, gemm(known).allowed) == (0, 0)


def test_one_wrong_weight_is_seen(known: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def packed(b: F32, bias: F32 | None) -> NDArray[np.uint8]:
        changed = b.copy()
        changed[5, 7] += 1
        return pack_gemm(changed, bias)

    monkeypatch.setattr(answers, "pack_gemm", packed)
    answer = gemm(known)
    assert 0 < answer.wrong <= 15  # one column of it
    assert answer.error > answer.allowed


def test_a_forgotten_sync_of_the_weights_is_seen(
    known: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = Buffer.to_device

    def sync(self: Buffer, offset: int, size: int) -> None:
        if sys._getframe(1).f_globals["__name__"] != answers.__name__:
            send(self, offset, size)

    monkeypatch.setattr(Buffer, "to_device", sync)
    assert gemm(known).wrong > 0


@pytest.mark.parametrize(("more_rows", "more_window"), [(1, 0), (-1, 0), (0, 1), (0, -1)])
def test_one_key_too_many_or_too_few_is_seen(
    known: Path, more_rows: int, more_window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Npu.run_mha

    def off_by_one(self: Npu, qkv: Rows, o: Rows, rows: int, window: int | None, name: str) -> None:
        window = window if window is None else window + more_window
        run(self, qkv, o, rows + more_rows, window, name=name)

    monkeypatch.setattr(Npu, "run_mha", off_by_one)
    answer = mha(known)
    assert answer.wrong > 0
    assert answer.error > 2 * answer.allowed


def test_a_nan_is_wrong() -> None:
    found = np.array([1.0, np.nan, 3.0])
    answer = Answer.of("k", found, np.array([1.0, 2.0, 3.0]), np.full(3, 9.0))
    assert (answer.numbers, answer.wrong) == (3, 1)
    assert np.isnan(answer.error)


def test_attention_is_the_definition() -> None:
    heads = Heads(heads=2, kv_heads=1, head_dim=2, stride=8, k_col=4, v_col=6, o_stride=4)
    rows = np.arange(24, dtype=np.float64).reshape(3, 8) / 16
    out, weighed = heads.attention(rows, window=1)
    for i in range(3):
        for head in range(2):
            keys = [j for j in range(3) if abs(i - j) <= 1]
            q = rows[i, 2 * head : 2 * head + 2]
            p = np.array([2.0 ** float(q @ rows[j, 4:6]) for j in keys])
            wanted = sum(pj / p.sum() * rows[j, 6:8] for pj, j in zip(p, keys, strict=True))
            np.testing.assert_allclose(out[i, 2 * head : 2 * head + 2], wanted, rtol=1e-12)
    np.testing.assert_array_equal(out, weighed)  # all values are positive here


def without(path: Path, *fields: str) -> Path:
    """The bundle with some fields of its records taken out."""
    manifest = path / "manifest.txt"
    lines = [
        " ".join(word for word in line.split(" ") if not word.startswith(fields))
        if line.startswith(("gemm ", "mha "))
        else line
        for line in manifest.read_text().splitlines()
    ]
    manifest.write_text("\n".join(lines) + "\n")
    return path


def test_records_that_say_nothing_give_no_answer(tiny_copy: Path) -> None:
    without(tiny_copy, "epilogue=", "heads=")
    with pytest.raises(NoAnswer, match="epilogue=none"):
        gemm(tiny_copy)
    with pytest.raises(NoAnswer, match="heads="):
        mha(tiny_copy)


def test_a_wrong_answer_fails_and_an_unknown_one_warns(
    known: Path, tiny_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session.open("emulated")

    def wrong(session: Session, bundle: Bundle) -> Answer:
        return Answer("qkv", 100, 3, 0.5, 0.125)

    found = runs._compared("gemm", wrong, session, Bundle.open(known))
    assert (found.status, found.situation) == ("FAIL", "wrong")
    assert "3 of 100 numbers wrong, the worst by 0.5" in found.found
    assert found.wanted == "at most 0.125"
    unknown = Bundle.open(without(tiny_copy, "epilogue="))
    found = runs._compared("gemm", gemm_answer, session, unknown)
    assert (found.status, found.situation) == ("WARN", "not-known")


@pytest.mark.parametrize(
    ("error", "situation", "words"),
    [
        (RunFailed("qkv: ended in TIMEOUT; do this."), "failed", "qkv: ended in TIMEOUT; do this"),
        (AttributeError("no such thing"), "bug", "AttributeError: no such thing"),
    ],
)
def test_a_run_that_raises_is_a_finding(
    known: Path, error: Exception, situation: str, words: str
) -> None:
    def fails(session: Session, bundle: Bundle) -> Answer:
        raise error

    found = runs._compared("mha", fails, Session.open("emulated"), Bundle.open(known))
    assert (found.status, found.situation, found.found) == ("FAIL", situation, words)
