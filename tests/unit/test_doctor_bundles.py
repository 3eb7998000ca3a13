"""The bundle: which one, for which device, how many contexts; and the settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from faked_machines import Faked

from npu_embed import fetch, settings
from npu_embed.bundle import Bundle
from npu_embed.doctor.bundles import (
    check_contexts,
    check_target,
    chosen_bundle,
    open_bundle,
    weights_bytes,
)
from npu_embed.doctor.findings import Finding, passed
from npu_embed.doctor.software import check_python, check_settings
from npu_embed.errors import SettingError


def test_the_named_bundle_goes_before_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_EMBED_BUNDLE", "/of/the/variable")
    assert chosen_bundle("/named") == Path("/named")
    assert chosen_bundle(None) == Path("/of/the/variable")


def test_a_variable_may_name_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NPU_EMBED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NPU_EMBED_BUNDLE", "minilm")
    assert chosen_bundle(None) is None  # not made yet
    (tmp_path / "minilm").mkdir()
    assert chosen_bundle(None) == Path("minilm")


def test_no_recipe_is_called_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "recipe_names", lambda: ("None",))
    monkeypatch.setattr(fetch, "read_recipe", lambda name: pytest.fail(name))
    monkeypatch.setenv("NPU_EMBED_BUNDLE", "/of/the/variable")
    assert chosen_bundle(None) == Path("/of/the/variable")


def test_an_empty_name_is_not_the_current_folder() -> None:
    with pytest.raises(SettingError, match="bundle '': empty, wanted a folder or the name"):
        chosen_bundle("")


def test_the_default_bundle_is_used_where_it_is_made_and_never_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_CACHE", str(tmp_path))
    assert chosen_bundle(None) is None
    recipe = fetch.read_recipe("minilm")
    made = tmp_path / "bundles" / f"{recipe.name}-{recipe.key}"
    made.mkdir(parents=True)
    (made / "manifest.txt").write_text("version 1\n")
    assert chosen_bundle(None) == made
    assert fetch.get() == made  # that is where it looks too


def test_what_is_no_bundle_is_a_failure_with_its_reason(tmp_path: Path) -> None:
    found = open_bundle(tmp_path)
    assert isinstance(found, Finding)
    assert (found.status, found.situation) == ("FAIL", "damaged")
    assert "manifest.txt" in found.found


def test_weights_are_counted_from_their_file(tiny_bundle: Path, tmp_path: Path) -> None:
    assert weights_bytes(tiny_bundle) == (tiny_bundle / "tensors.safetensors").stat().st_size
    assert weights_bytes(tmp_path) == 0


def test_a_bundle_of_another_generation_fails(tiny_bundle: Path) -> None:
    bundle = Bundle.open(tiny_bundle)
    assert check_target(bundle, "npu2", on_npu=False).status == "PASS"
    found = check_target(bundle, "npu1", on_npu=True)
    assert (found.status, found.situation) == ("FAIL", "other-generation")
    assert found.found == "tiny-bert has kernels for npu2"
    assert found.action == "export it with --target npu1"
    emulated = check_target(bundle, "npu1", on_npu=False)
    assert emulated.action.endswith("or set NPU_EMBED_EMU_PROFILE=npu2")


@pytest.mark.parametrize("generation", ["npu2", "npu1", None])
def test_where_an_npu_is_demanded_array_programs_fail_whatever_there_is(
    tiny_bundle: Path, generation: str | None
) -> None:
    found = check_target(Bundle.open(tiny_bundle), generation, on_npu=False, demanded=True)
    assert (found.status, found.situation) == ("FAIL", "array-programs")
    assert found.found == "tiny-bert has array programs, which only the emulated NPU runs"
    assert "npu-embed doctor BUNDLE" in found.action


def test_a_device_of_unknown_generation_contradicts_nothing(tiny_bundle: Path) -> None:
    assert check_target(Bundle.open(tiny_bundle), None, on_npu=True).status == "PASS"


@pytest.mark.parametrize(
    ("limit", "status"), [(16, "PASS"), (5, "PASS"), (4, "WARN"), (1, "WARN"), (None, "PASS")]
)
def test_more_contexts_than_slots_swap(split_bundle: Path, limit: int | None, status: str) -> None:
    found = check_contexts(Bundle.open(split_bundle), limit)
    assert (found.facts["contexts"], found.status) == (5, status)  # a sixth xclbin runs nothing


# Settings


@pytest.fixture
def faked(tmp_path: Path) -> Faked:
    return Faked(tmp_path)


def test_settings_are_named_without_their_values(faked: Faked) -> None:
    environ = {"NPU_EMBED_API_KEY": "secret", "NPU_EMBED_DEVICE": "emulated", "HOME": "/x"}
    found = check_settings(replace(faked.machine(), environ=environ))
    assert (found.status, found.found) == ("PASS", "set: NPU_EMBED_API_KEY, NPU_EMBED_DEVICE")


def test_a_variable_that_means_nothing_is_told_with_the_nearest(faked: Faked) -> None:
    machine = replace(faked.machine(), environ={"NPU_EMBED_DEVCE": "npu"})
    found = check_settings(machine)
    assert (found.status, found.situation) == ("WARN", "unknown")
    assert found.text == (
        "NPU_EMBED_DEVCE means nothing, wanted perhaps NPU_EMBED_DEVICE; correct or unset it"
    )


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("NPU_EMBED_DEVICE", "gpu"),
        ("NPU_EMBED_EMU_SLOTS", "0"),
    ],
)
def test_a_refused_value_fails_in_the_settings_words(
    faked: Faked, variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    found = check_settings(faked.machine())
    assert (found.status, found.situation) == ("FAIL", "refused")
    assert found.found.startswith(f"{variable}={value!r}: ")


ANYTHING = {"BUNDLE", "CACHE", "API_KEY", "EMU_DIR", "EMU_FAULTS"}  # any text is one of these


@pytest.mark.parametrize("variable", [v for v in settings.VARIABLES if v[10:] not in ANYTHING])
def test_every_setting_is_read(
    faked: Faked, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "no such folder/or value")
    assert check_settings(faked.machine()).found.startswith(f"{variable}=")


def test_faults_on_purpose_are_told(faked: Faked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_EMBED_EMU_FAULTS", "timeout@3")
    found = check_settings(faked.machine())
    assert (found.status, found.situation) == ("WARN", "faults")
    assert "timeout@3" in found.found


def test_what_runs_is_told(faked: Faked) -> None:
    found = check_python(faked.machine())
    assert found.status == "PASS"
    assert found.facts["python"] == "3.11"


# A finding


def test_a_line_is_found_wanted_and_what_to_do() -> None:
    assert Finding("c", "FAIL", "s", "a", "b", "do c").text == "a, wanted b; do c"
    assert Finding("c", "FAIL", "s", "a", action="do c").text == "a; do c"
    assert passed("c", "a", n=1) == Finding("c", "PASS", "ok", "a", facts={"n": 1})
