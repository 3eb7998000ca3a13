"""What listeners are told of runs: lists, switches, swaps, failures, times."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from heard import Heard
from rigs import MakeRig, Rig, Slots

from npu_embed import events
from npu_embed.errors import RunFailed
from npu_embed.kernels import Kernel


def test_a_run_is_told_with_its_kernel_context_and_rows(rig: Rig) -> None:
    heard = Heard()
    with events.listening(heard):
        rig.gemm(rows=70)
    (ended,) = heard.of(events.RunsEnded)
    assert ended.runs == (events.RunSeen("qkv_r96", 70, 96),)
    assert ended.context == "gemm.xclbin"
    assert ended.begin <= ended.end
    assert not (ended.listed)
    assert not (ended.switched)
    assert not (ended.swapped)
    assert not ended.failed


def test_runs_of_a_list_are_told_as_one(rig: Rig) -> None:
    heard = Heard()
    with events.listening(heard):
        rig.attend(3, 20)
    (ended,) = heard.of(events.RunsEnded)
    assert ended.listed
    assert ended.runs == (events.RunSeen("mha_16", 3, 16), events.RunSeen("mha_32", 20, 32))


def test_runs_without_a_list_are_told_one_by_one_and_do_not_overlap(
    make: MakeRig, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_RUNLISTS", "off")
    rig, heard = make(tiny_bundle), Heard()
    rig.gemm()
    with events.listening(heard):
        rig.attend(3, 5, 20)
    found = heard.of(events.RunsEnded)
    assert [run.rows for ended in found for run in ended.runs] == [3, 5, 20]
    assert [ended.switched for ended in found] == [True, False, False]
    for before, after in itertools.pairwise(found):
        assert before.end <= after.begin <= after.end


def test_a_switch_and_a_swap_are_told_with_the_run_they_were_for(
    make: MakeRig, tiny_bundle: Path, slots: Slots
) -> None:
    slots(1)
    rig, heard = make(tiny_bundle), Heard()
    with events.listening(heard):
        rig.gemm()
        rig.mha()
        rig.mha()
    told = [(e.context, e.switched, e.swapped) for e in heard.of(events.RunsEnded)]
    assert told == [
        ("gemm.xclbin", False, False),
        ("mha.xclbin", True, True),
        ("mha.xclbin", False, False),
    ]
    assert [(d.context, d.why) for d in heard.of(events.ContextDropped)] == [
        ("gemm.xclbin", "swap")
    ]
    assert [made.context for made in heard.of(events.ContextMade)] == ["gemm.xclbin", "mha.xclbin"]


def test_loads_and_patches_are_told_with_what_they_hold(rig: Rig) -> None:
    heard = Heard()
    with events.listening(heard):
        rig.mha(5, window=2)
    (loaded,) = heard.of(events.StreamLoaded)
    (patched,) = heard.of(events.WordsPatched)
    assert (loaded.kernel, loaded.context) == ("mha_16", "mha.xclbin")
    (bucket,) = [mha for mha in rig.bundle.specs.mhas if mha.rows == 16]
    assert {patched.words[word] for word in bucket.kv_words} == {5}
    assert {patched.words[word] for word in bucket.win_words} == {2}
    rig.npu.unload_all()
    assert loaded.stream == rig.bundle.stream(bucket, bucket.insts)


def test_a_run_that_fails_is_told_as_failed(
    make: MakeRig, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_EMU_FAULTS", "error@1")
    rig, heard = make(tiny_bundle), Heard()
    with events.listening(heard):
        with pytest.raises(RunFailed):
            rig.gemm()
        rig.gemm()
    assert [ended.failed for ended in heard.of(events.RunsEnded)] == [True, False]


def test_a_run_that_cannot_be_started_is_told_as_failed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Kernel, views: object) -> None:
        raise RunFailed("refused")

    monkeypatch.setattr(Kernel, "start", refuse)
    heard = Heard()
    with events.listening(heard), pytest.raises(RunFailed):
        rig.gemm()
    assert [ended.failed for ended in heard.of(events.RunsEnded)] == [True]


def test_listening_changes_no_bit(rig: Rig) -> None:
    unheard = rig.attend(3, 5, 20).tobytes()
    with events.listening(Heard()):
        assert rig.attend(3, 5, 20).tobytes() == unheard
