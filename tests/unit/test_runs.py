"""Runs made out: which stream, which views, which words."""

from __future__ import annotations

import pytest
from rigs import HIDDEN, Rig

from npu_embed.runs import GemmRun, MhaRun

NO_WINDOW = 0xFFFFFFFF
BF16_BYTES = 2


@pytest.mark.parametrize(
    ("rows", "name", "file", "computed"),
    [
        (1, "qkv_r16", "qkv_r16", 16),
        (16, "qkv_r16", "qkv_r16", 16),
        (17, "qkv_r32", "qkv_r32", 32),
        (48, "qkv_r48", "qkv_r48", 48),
        (49, "qkv", "qkv_x1", 64),
        (65, "qkv_r96", "qkv_r96", 96),
        (97, "qkv_x2", "qkv_x2", 128),
        (256, "qkv_x4", "qkv_x4", 256),
    ],
)
def test_a_gemm_takes_the_shortest_stream_and_views_as_long_as_its_rows(
    rig: Rig, rows: int, name: str, file: str, computed: int
) -> None:
    step = GemmRun("qkv", rig.x, rig.weights["qkv"], rig.qkv, rows).step(
        rig.bundle.specs, NO_WINDOW
    )
    assert (step.name, step.file) == (name, f"kernels/{file}.insts.bin")
    a, w, c = step.views
    assert (a.offset, a.size) == (0, computed * HIDDEN * BF16_BYTES)
    assert (w.offset, w.size) == (0, rig.weights["qkv"].size)
    assert (c.offset, c.size) == (0, computed * 3 * HIDDEN * BF16_BYTES)
    assert step.words is None
    with pytest.raises(AssertionError):
        step.patch()


def test_a_gemm_may_begin_at_a_column(rig: Rig) -> None:
    run = GemmRun("o", rig.qkv, rig.weights["o"], rig.out, 3, col=2 * HIDDEN)
    assert run.step(rig.bundle.specs, NO_WINDOW).views[0].offset == 2 * HIDDEN * BF16_BYTES


@pytest.mark.parametrize(
    ("rows", "window", "row", "name", "words"),
    [
        (1, None, 0, "mha_16", (1, NO_WINDOW)),
        (16, 0, 5, "mha_16", (16, 0)),
        (17, 3, 7, "mha_32", (17, 3)),
        (33, None, 0, "mha_48", (33, NO_WINDOW)),
        (128, None, 0, "mha_128", (128, NO_WINDOW)),
    ],
)
def test_attention_takes_the_shortest_bucket_and_its_words(
    rig: Rig, rows: int, window: int | None, row: int, name: str, words: tuple[int, int]
) -> None:
    step = MhaRun(rig.qkv, rig.o, rows, window, row).step(rig.bundle.specs, NO_WINDOW)
    assert (step.name, step.words) == (name, words)
    q, k, v, o = step.views
    assert q.offset == k.offset == v.offset == row * 3 * HIDDEN * BF16_BYTES
    assert o.offset == row * HIDDEN * BF16_BYTES
    spec = rig.bundle.specs.mha_for(rows, None)
    assert spec is not None
    assert step.patch() == {
        **dict.fromkeys(spec.kv_words, words[0]),
        **dict.fromkeys(spec.win_words, words[1]),
    }
    assert len(step.patch()) == len(spec.kv_words) + len(spec.win_words)


def test_results_are_the_rows_asked_for(rig: Rig) -> None:
    gemm = GemmRun("qkv", rig.x, rig.weights["qkv"], rig.qkv, 5)
    assert gemm.results() == (rig.qkv, 0, 5)
    assert MhaRun(rig.qkv, rig.o, 5, row=7).results() == (rig.o, 7, 5)


@pytest.mark.parametrize("rows", [0, -1, 129])
@pytest.mark.parametrize("name", [None, "mha", "other"])
def test_attention_without_a_bucket_is_refused(rig: Rig, rows: int, name: str | None) -> None:
    longest = 0 if name == "other" else 128
    with pytest.raises(ValueError, match=rf"{name or 'mha'}: {rows} rows, wanted 1 to {longest}"):
        MhaRun(rig.qkv, rig.o, rows, name=name).step(rig.bundle.specs, NO_WINDOW)
