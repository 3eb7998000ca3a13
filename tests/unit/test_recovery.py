"""Verified forwards, their one repetition, and the device that counts as bad."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from bundle_edits import edited
from numpy.typing import NDArray

from npu_embed import DeviceBad, DeviceError, Embedder, NoFreeContext, RunFailed, SettingError
from npu_embed.canary import Canary
from npu_embed.driver import Counters
from npu_embed.driver import Xrt as Anything
from npu_embed.emulator.faults import Faults, parse
from npu_embed.recovery import Kind, Recovery

F32 = NDArray[np.float32]

TEXTS = ["two cats on a sofa", "a red car", "password"]


@pytest.fixture
def opened(tiny_bundle: Path) -> Iterator[Embedder]:
    with Embedder(tiny_bundle, "emulated", verify="never") as embedder:
        yield embedder


def plan(embedder: Embedder, text: str) -> Faults:
    """What goes wrong from now on, on the device of an Embedder."""
    planned: Faults = embedder._session.device._npu.plan_faults(parse(text))
    return planned


def calm(embedder: Embedder) -> None:
    embedder._session.device._npu.plan_faults(())


# --- repetition ---------------------------------------------------------------------------------


def test_a_pack_that_fails_is_computed_again_on_new_contexts(
    opened: Embedder, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = opened.embed(TEXTS)
    before = opened.stats
    assert before.rebuilds == 0
    struck = plan(opened, "abort@2").struck
    np.testing.assert_array_equal(opened.embed(TEXTS), wanted)
    assert struck == {"abort": 1}
    assert opened.last_stats.rebuilds == 1
    assert opened.last_stats.loads == before.loads  # everything was loaded anew
    assert opened.stats.texts == 2 * len(TEXTS)
    said = [r.getMessage() for r in caplog.records if r.name == "npu_embed"]
    assert len(said) == 1
    assert said[0].startswith("mha_16")
    assert said[0].endswith("; once more, on contexts made anew")


@pytest.mark.parametrize("kind", ["timeout", "error", "abort"])
def test_a_device_that_fails_twice_is_bad_until_it_is_released(opened: Embedder, kind: str) -> None:
    wanted = opened.embed(TEXTS)
    plan(opened, f"{kind}@1+")
    words = rf"failed twice on Emulated NPU.*doctor.*dmesg.*release\(\).*First: qkv_r\d+: .*{kind}"
    with pytest.raises(DeviceBad, match=f"(?is){words}.* Then: qkv_r.*{kind}") as first:
        opened.embed(TEXTS)
    calm(opened)
    assert opened.contexts_held == 0
    runs = opened.stats.runs
    for _ in range(3):
        with pytest.raises(DeviceBad) as later:
            opened.embed("another")
        assert str(later.value) == str(first.value)
    assert opened.stats.runs == runs
    opened.release()
    np.testing.assert_array_equal(opened.embed(TEXTS), wanted)


def test_another_embedder_is_not_bad(opened: Embedder, tiny_bundle: Path) -> None:
    plan(opened, "error@1+")
    with pytest.raises(DeviceBad):
        opened.embed("a")
    with Embedder(tiny_bundle, "emulated") as other:
        other.embed("a")


def test_failures_of_different_packs_are_forgotten(opened: Embedder) -> None:
    wanted = opened.embed(TEXTS)
    plan(opened, "error@1/40")
    for _ in range(5):
        np.testing.assert_array_equal(opened.embed(TEXTS), wanted)
    assert opened.stats.rebuilds > 1


def test_want_of_contexts_is_not_a_failure_of_the_device(
    opened: Embedder, monkeypatch: pytest.MonkeyPatch, tiny_bundle: Path
) -> None:
    monkeypatch.setenv("NPU_EMBED_SLOT_WAIT_MS", "0")
    with Embedder(tiny_bundle, "emulated") as waiting:
        plan(waiting, "context=EBUSY@1+")
        with pytest.raises(NoFreeContext, match="Device or resource busy"):
            waiting.embed("a")
        calm(waiting)
        assert waiting.stats.rebuilds == 0
        waiting.embed("a")


def test_a_device_that_is_gone_is_told_from_one_without_a_free_context(opened: Embedder) -> None:
    plan(opened, "gone@3")
    with pytest.raises(DeviceBad, match=r"First: .*No such device.* Then: .*the device is gone"):
        opened.embed(TEXTS)


def test_no_room_for_instructions_is_made_by_letting_go(opened: Embedder) -> None:
    wanted = opened.embed(TEXTS)
    opened.embed("a b c d e f")
    plan(opened, "heap@1")
    np.testing.assert_array_equal(opened.embed([*TEXTS]), wanted)
    opened.embed("one two three four five six seven eight nine")
    assert opened.stats.rebuilds == 1


def test_memory_that_cannot_be_locked_ends_the_opening_and_frees_what_there_was(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for nth in (1, 4, 13):
        monkeypatch.setenv("NPU_EMBED_EMU_FAULTS", f"memlock@{nth}")
        with pytest.raises(DeviceError, match=r"not allocated; check `ulimit -l`.*err=-11"):
            Embedder(tiny_bundle, "emulated")


# --- canary -------------------------------------------------------------------------------------


def test_startup_embeds_the_canary_once_in_the_contexts_it_took(tiny_bundle: Path) -> None:
    with (
        Embedder(tiny_bundle, "emulated", verify="startup") as verified,
        Embedder(tiny_bundle, "emulated", verify="never") as trusting,
    ):
        wanted = trusting.embed(TEXTS)
        np.testing.assert_array_equal(verified.embed(TEXTS), wanted)
        canary = verified.last_stats.runs - trusting.last_stats.runs
        assert canary > 0
        verified.embed(TEXTS)
        assert verified.last_stats.runs == trusting.last_stats.runs
        verified.release()
        verified.embed(TEXTS)
        assert verified.last_stats.runs == trusting.last_stats.runs + canary


def test_in_one_slot_swaps_are_not_verified_each(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_EMU_SLOTS", "1")
    runs = {}
    for verify in ("never", "startup"):
        with Embedder(tiny_bundle, "emulated", verify=verify) as embedder:
            embedder.embed(TEXTS)
            first = embedder.last_stats.runs
            embedder.embed(TEXTS)
            assert embedder.last_stats.swaps > 0
            runs[verify] = first, embedder.last_stats.runs
    assert runs["startup"][0] > runs["never"][0] == runs["never"][1] == runs["startup"][1]


def test_a_corrupted_canary_is_computed_again_and_then_the_device_is_bad(
    tiny_bundle: Path, opened: Embedder
) -> None:
    wanted = opened.embed(TEXTS)
    with Embedder(tiny_bundle, "emulated", verify="startup") as verified:
        plan(verified, "flip=0.2@1")
        np.testing.assert_array_equal(verified.embed(TEXTS), wanted)
        assert verified.last_stats.rebuilds == 1
        verified.release()
        plan(verified, "flip=0.2@1+")
        with pytest.raises(DeviceBad, match=r"canary \(text \d\): .*(wanted|not finite)"):
            verified.embed(TEXTS)


def test_never_returns_what_the_device_computed(opened: Embedder) -> None:
    wanted = opened.embed(TEXTS)
    plan(opened, "flip=0.05@4")
    assert not np.array_equal(opened.embed(TEXTS), wanted)
    assert opened.stats.rebuilds == 0


@pytest.mark.slow
def test_always_sees_results_that_change_from_run_to_run(
    tiny_bundle: Path, opened: Embedder
) -> None:
    wanted = opened.embed(TEXTS)
    runs = opened.stats.runs
    with Embedder(tiny_bundle, "emulated", verify="always") as verified:
        verified.embed(TEXTS)
        for nth in range(1, 2 * runs + 1, 3):
            plan(verified, f"flip=0.05@{nth}")
            np.testing.assert_array_equal(verified.embed(TEXTS), wanted)
        assert runs // 6 < verified.stats.rebuilds <= runs
        plan(verified, "flip=0.05@1+")
        with pytest.raises(DeviceBad, match=r"two runs of the same pack gave other bits|canary"):
            verified.embed(TEXTS)


def test_a_bundle_without_references_is_its_own_from_then_on(
    tiny_bundle: Path, tmp_path: Path
) -> None:
    bundle = edited(tiny_bundle, tmp_path / "bare", ("\ntref ", "\nunknown "))
    with Embedder(bundle, "emulated", verify="startup") as verified:
        wanted = verified.embed(TEXTS)
        verified.release()
        plan(verified, "flip=0.5@1")
        np.testing.assert_array_equal(verified.embed(TEXTS), wanted)
        assert verified.stats.rebuilds == 1


@pytest.mark.slow
def test_images_have_a_canary_of_their_own(eg2_bundle: Path) -> None:
    image = np.full((48, 48, 3), 77, dtype=np.uint8)
    with Embedder(eg2_bundle, "emulated", verify="startup") as verified:
        wanted = verified.embed_image(image)
        first = verified.last_stats.runs
        np.testing.assert_array_equal(verified.embed_image(image), wanted)
        assert verified.last_stats.runs < first
        plan(verified, "abort@3")
        np.testing.assert_array_equal(verified.embed_image(image), wanted)
        assert verified.last_stats.rebuilds == 1
        verified.release()
        plan(verified, "flip=0.2@1/2")
        with pytest.raises(DeviceBad, match=r"canary \(image \w+\)"):
            verified.embed_image(image)


@pytest.mark.parametrize(
    ("vectors", "reference", "words"),
    [
        (
            [[1.0, 0.0]],
            [0.0, 1.0],
            r"canary \(x\): its vector is not the stored one: lowest cosine",
        ),
        ([[np.nan, 0.0]], [0.0, 1.0], "lowest cosine nan"),
        ([[1.0, 0.0, 0.0]], [0.0, 1.0], "3 numbers"),
        ([[1.0, 0.0], [0.6, 0.8]], None, "not the vector it was before"),
        ([[np.nan, 0.0], [np.nan, 0.0]], None, "not the vector it was before"),
        ([[0.0, 1.0], [1e-7, 1.0]], [0.0, 1.0], "not the vector it was before"),
    ],
)
def test_a_canary_that_is_another_is_a_failed_run(
    vectors: list[list[float]], reference: list[float] | None, words: str
) -> None:
    left = [np.array(v, dtype=np.float32) for v in vectors]
    known = None if reference is None else np.array(reference, dtype=np.float32)
    canary = Canary("x", lambda: left.pop(0), known, 0.999)
    if reference is not None and len(vectors) == 2:
        canary.check()
    with pytest.raises(RunFailed, match=words):
        canary.check()
    assert not left


def test_contexts_taken_in_mid_forward_are_verified_before_anything_is_returned() -> None:
    npu = fake_npu("emulated")
    log: list[str] = []

    def take(what: str) -> F32:
        log.append(what)
        npu.contexts_held, npu.contexts_taken = 1, npu.contexts_taken + (len(log) < 3)
        return np.ones((1, 2), dtype=np.float32)

    of = Kind(lambda: Canary("x", lambda: take("canary")[0], np.ones(2, np.float32), 0.999))
    recovery = Recovery(npu, "startup")
    recovery.run(of, lambda: take("forward"))
    assert log == ["canary", "forward", "canary"]
    recovery.run(of, lambda: take("forward"))
    assert log[3:] == ["forward"]
    npu.contexts_held = 0  # given up since
    recovery.run(of, lambda: take("forward"))
    assert log[-2:] == ["canary", "forward"]


# --- choice -------------------------------------------------------------------------------------


def fake_npu(kind: str) -> Anything:
    session = SimpleNamespace(kind=kind, device_name="NPU", counters=Counters())
    bundle = SimpleNamespace(path=Path("b"))
    return SimpleNamespace(
        session=session, bundle=bundle, contexts_held=0, contexts_taken=0, unload_all=lambda: 0
    )


@pytest.mark.parametrize(
    ("asked", "kind", "found"),
    [
        ("auto", "npu", "startup"),
        ("auto", "emulated", "never"),
        ("startup", "emulated", "startup"),
        ("never", "npu", "never"),
        ("always", "npu", "always"),
    ],
)
def test_auto_trusts_the_emulated_npu_only(asked: str, kind: str, found: str) -> None:
    assert Recovery(fake_npu(kind), asked).verify == found


def test_the_setting_chooses_where_nothing_is_asked_for(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_VERIFY", "always")
    with Embedder(tiny_bundle, "emulated") as opened:
        assert opened._recovery.verify == "always"
    with Embedder(tiny_bundle, "emulated", verify="never") as opened:
        assert opened._recovery.verify == "never"


@pytest.mark.parametrize("verify", ["once", "", True, 3])
def test_another_way_to_verify_is_refused(tiny_bundle: Path, verify: Anything) -> None:
    with pytest.raises(SettingError, match=r"^verify=.*: unknown way to verify, wanted 'auto'"):
        Embedder(tiny_bundle, "emulated", verify=verify)


def test_a_vector_that_is_not_finite_twice_is_returned_and_marks_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recovery = Recovery(fake_npu("emulated"), "never")
    of = Kind(lambda: None)
    odd = [np.array([[np.inf, 1.0]], dtype=np.float32)]
    with caplog.at_level(logging.WARNING):
        assert recovery.run(of, lambda: odd) is odd
    assert "a vector is not finite; once more" in caplog.text
    fine = [np.ones((1, 2), dtype=np.float32)]
    assert recovery.run(of, lambda: fine) is fine
