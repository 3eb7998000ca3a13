"""Files changed at random by the harness of `make fuzz`: accepted, or refused as is right."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
from fuzz import checkpoints, json_changes, mutate
from fuzz.run import SEEDS
from fuzz.targets import ARGUMENT_BYTES, TARGETS
from guards import guarded_run
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_embed.emulator import program, txn, xclbin
from npu_embed.manifest import Manifest
from npu_embed.specs import parse_specs
from npu_embed.tensors import open_safetensors
from npu_embed.tokenizer import Tokenizer

CHEAP = sorted(TARGETS.keys() - {"bundle", "embed", "checkpoint"})


def seeds(target: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((SEEDS / target).iterdir())]


@pytest.fixture(autouse=True)
def _limits_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target lowers the emulator's limit of work for its process."""
    monkeypatch.setattr(program, "MAX_ELEMS", program.MAX_ELEMS)


@pytest.mark.parametrize("target", CHEAP)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_changed_seed_is_accepted_or_refused(target: str, seed: int) -> None:
    TARGETS[target](mutate.mutated(random.Random(seed), seeds(target)))


@pytest.mark.parametrize("target", CHEAP)
@settings(max_examples=25, deadline=None)
@given(data=st.binary(max_size=64))
def test_any_bytes_are_accepted_or_refused(target: str, data: bytes) -> None:
    TARGETS[target](data)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_bundle_with_a_changed_manifest_is_accepted_or_refused(seed: int) -> None:
    TARGETS["bundle"](mutate.mutated(random.Random(seed), seeds("bundle")))


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_checkpoint_with_a_changed_file_is_exported_or_refused(seed: int) -> None:
    TARGETS["checkpoint"](mutate.mutated(random.Random(seed), seeds("checkpoint")))


def test_there_are_seeds_for_every_target_and_make_fuzz_has_it() -> None:
    assert {path.name for path in SEEDS.iterdir()} == set(TARGETS)
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    (listed,) = re.findall(r"^FUZZ_TARGETS \?= (.*)$", makefile, re.MULTILINE)
    assert sorted(listed.split()) == sorted(TARGETS)


def test_the_seeds_are_accepted_so_that_what_follows_acceptance_is_fuzzed_too() -> None:
    for data in seeds("manifest"):
        assert parse_specs(Manifest.parse(data)).all_gemms
    for data in seeds("xclbin"):
        assert xclbin.parse(data).kernels
    for data in seeds("runs"):
        assert txn.decode(data).ops
    assert open_safetensors(SEEDS / "safetensors/small").names()
    assert Tokenizer.from_file(SEEDS / "tokenizer/tiny-bert", max_tokens=16).vocab_size


@pytest.mark.slow
def test_seeds_of_checkpoints_become_bundles(tmp_path: Path) -> None:
    for model in checkpoints.MODELS:
        seed = (SEEDS / f"checkpoint/{model}_config.json").read_bytes()
        assert checkpoints.export(tmp_path, seed) == 1 + (model in checkpoints.PUBLISHED)
    assert sorted(place.name for place in checkpoints.places(tmp_path)) == sorted(
        path.name for path in (SEEDS / "checkpoint").iterdir()
    )


def test_seeds_of_runs_run(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[object] = []

    def recorded(*arguments: object) -> object:
        found.append(guarded_run(*arguments))  # type: ignore[arg-type]
        return found[-1]

    monkeypatch.setattr("fuzz.targets.guarded_run", recorded)
    for data in seeds("runs"):
        TARGETS["runs"](data)
    ran = [one for one in found if isinstance(one, list)]
    assert len(ran) == len(seeds("runs"))
    assert all(len(one) == len(ARGUMENT_BYTES) for one in ran)


# -- changes that leave JSON what it is

HEADED = len(b'{"a": [1, 2]}').to_bytes(8, "little") + b'{"a": [1, 2]}'


@pytest.mark.parametrize(
    ("data", "before"),
    [
        (b'{"a": [1, {"b": "c"}]}', b""),
        (b'\x05{"a": [1, {"b": "c"}]}', b"\x05"),
        (b"[1, 2, 3]", b""),
    ],
)
def test_changed_json_is_json(data: bytes, before: bytes) -> None:
    found = {json_changes.changed(random.Random(n), data) for n in range(200)}
    for one in found:
        assert one is not None
        assert one.startswith(before)
        json.loads(one.removeprefix(before))
    assert len(found) > 50


@pytest.mark.parametrize("before", [b"", b"\x1c"])
def test_a_changed_safetensors_header_says_its_length(before: bytes) -> None:
    for n in range(100):
        one = json_changes.changed(random.Random(n), before + HEADED + b"numbers")
        assert one is not None
        assert one.startswith(before)
        length = int.from_bytes(one[len(before) : len(before) + 8], "little")
        json.loads(one[len(before) + 8 :][:length])
        assert one[len(before) + 8 + length :] == b"numbers"


@pytest.mark.parametrize("data", [b"", b"manifest", b"{", b'{"a": ', b"\xff" * 20])
def test_what_is_no_json_is_left_to_other_changes(data: bytes) -> None:
    assert json_changes.changed(random.Random(1), data) is None


# -- the fuzzer without coverage


def test_a_finding_is_kept_and_ends_the_run(tmp_path: Path) -> None:
    def target(data: bytes) -> None:
        if b"\xff" in data:
            raise ZeroDivisionError

    kept: list[bytes] = []
    with pytest.raises(ZeroDivisionError):
        mutate.fuzz(target, [b"abc" * 9], 60, 1, kept.append)
    assert len(kept) == 1
    assert b"\xff" in kept[0]


def test_the_same_numbers_make_the_same_changes() -> None:
    given_seeds = seeds("manifest")
    first, again = (
        [mutate.mutated(random.Random(7), given_seeds) for _ in range(9)] for _ in range(2)
    )
    assert first == again
    assert len({mutate.mutated(random.Random(n), given_seeds) for n in range(50)}) > 45


def test_changes_of_an_empty_seed_are_bytes() -> None:
    for n in range(200):
        assert isinstance(mutate.mutated(random.Random(n), [b"", b"x"]), bytes)
