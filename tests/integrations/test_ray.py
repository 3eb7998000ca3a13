"""Engines on the actors of a Ray cluster of this machine."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Generator, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import commandline
import numpy as np
import pytest

pytestmark = [
    pytest.mark.alone,  # a cluster, whose workers are processes
    # Ray's own: sockets and files of the processes it starts, and its plans for later versions.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

ray = pytest.importorskip("ray")

from npu_embed import BundleError, DeviceError, Embedder, InputError, InputTypeError  # noqa: E402
from npu_embed.batch import Job, run  # noqa: E402
from npu_embed.driver import Xrt as Anything  # noqa: E402
from npu_embed.integrations.ray import (  # noqa: E402
    NpuActor,
    connect,
    on_cluster,
    run_on_actors,
    ship,
)

ROOT = Path(__file__).parent.parent.parent
TEXTS = [f"{i} cats on a {'red ' * (i % 5)}sofa" for i in range(60)]


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    """Two cores, for two actors; the package comes from this checkout."""
    runtime = {"env_vars": {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}}
    # The workers have no module of that name.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=runtime)
    yield
    ray.shutdown()


def embed(embedder: Embedder, texts: list[str]) -> tuple[Any, int]:
    """The vectors, and which process made them."""
    return embedder.embed(texts), os.getpid()


def die_once(folder: Path, embedder: Embedder, texts: list[str]) -> Anything:
    """The vectors, but the first process that gets the third item dies over it."""
    if texts[0] == TEXTS[20]:
        try:
            (folder / "died").mkdir()
        except FileExistsError:
            pass
        else:
            os._exit(1)
    return embedder.embed(texts)


def fail_once(folder: Path, embedder: Embedder, texts: list[str]) -> Anything:
    """The vectors, but the device fails at first."""
    try:
        (folder / "failed").mkdir()
    except FileExistsError:
        return embedder.embed(texts)
    raise DeviceError("the device: lost once, wanted it back; try again.")


def always_die(embedder: Embedder, texts: list[str]) -> None:
    """Die over every item."""
    os._exit(1)


PARTS = [TEXTS[i : i + 10] for i in range(0, 60, 10)]


def in_order(found: Iterator[tuple[list[str], Any]]) -> list[Any]:
    """What was made of PARTS, in their order."""
    made = [(PARTS.index(part), result) for part, result in found]
    assert sorted(index for index, _ in made) == list(range(len(PARTS)))
    return [result for _, result in sorted(made, key=lambda one: one[0])]


@pytest.mark.parametrize("way", ["path", "shipped"])
def test_a_dataset_gets_the_vectors_of_one_process(
    embedder: Embedder,
    prompted_bundle: Path,
    way: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = ray.data.from_items([{"text": text, "n": i} for i, text in enumerate(TEXTS)])
    found = rows.map_batches(
        NpuActor,
        fn_constructor_kwargs={
            "bundle": prompted_bundle if way == "path" else ship(prompted_bundle),
            "device": "emulated",
            "dim": 16,
        },
        batch_size=10,
        compute=ray.data.ActorPoolStrategy(size=2),
        runtime_env={"env_vars": {"NPU_EMBED_CACHE": str(tmp_path)}},
    ).take_all()
    by_number = {row["n"]: row for row in found}
    assert [by_number[i]["text"] for i in range(60)] == TEXTS
    vectors = np.stack([by_number[i]["embedding"] for i in range(60)])
    wanted = np.concatenate([embedder.embed_document(part, 16) for part in PARTS])
    np.testing.assert_array_equal(vectors, wanted)
    assert vectors.dtype == np.float32
    assert any(tmp_path.iterdir()) == (way == "shipped")


def test_two_actors_do_as_one_process(embedder: Embedder, prompted_bundle: Path) -> None:
    made = in_order(
        run_on_actors(embed, PARTS, bundle=prompted_bundle, device="emulated", actors=2)
    )
    assert len({process for _, process in made} - {os.getpid()}) == 2
    for part, (vectors, _) in zip(PARTS, made, strict=True):
        np.testing.assert_array_equal(vectors, embedder.embed(part))


def test_items_are_asked_for_as_actors_become_free(prompted_bundle: Path) -> None:
    asked: list[int] = []

    def parts() -> Iterator[list[str]]:
        for i, part in enumerate(PARTS):
            asked.append(i)
            yield part

    running = run_on_actors(embed, parts(), bundle=prompted_bundle, device="emulated", actors=1)
    assert asked == []
    next(running)
    assert asked == [0, 1]
    running.close()
    assert asked == [0, 1]


@pytest.mark.parametrize("work", [die_once, fail_once])
def test_an_item_whose_actor_dies_or_device_fails_is_done_again(
    embedder: Embedder, prompted_bundle: Path, tmp_path: Path, work: Anything
) -> None:
    made = in_order(
        run_on_actors(
            partial(work, tmp_path), PARTS, bundle=prompted_bundle, device="emulated", actors=1
        )
    )
    assert len(list(tmp_path.iterdir())) == 1
    for part, vectors in zip(PARTS, made, strict=True):
        np.testing.assert_array_equal(vectors, embedder.embed(part))


def test_an_item_that_kills_every_actor_is_an_error(prompted_bundle: Path) -> None:
    with pytest.raises(DeviceError, match=r"ray: .*died.*tried 4 times"):
        list(run_on_actors(always_die, [["a"]], bundle=prompted_bundle, device="emulated"))


@pytest.mark.parametrize(
    ("bundle", "item", "error", "words"),
    [
        ("", [None], InputTypeError, r"texts\[0\]: NoneType, wanted str"),
        ("/nowhere", ["a"], BundleError, r"/nowhere: no such folder, wanted a bundle"),
    ],
)
def test_an_error_is_raised_as_it_was_there(
    prompted_bundle: Path, bundle: str, item: list[Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        list(run_on_actors(embed, [item], bundle=bundle or prompted_bundle, device="emulated"))
    assert type(caught.value) is error  # not Ray's, which is one too, with a traceback in its text


@pytest.mark.parametrize(
    ("actors", "error", "words"),
    [
        (0, InputError, r"actors=0: wanted at least 1"),
        (True, InputTypeError, r"actors=True: bool, wanted an integer"),
        ("2", InputTypeError, r"actors='2': str, wanted an integer"),
    ],
)
def test_a_number_of_actors_that_cannot_be_is_refused(
    actors: Anything, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        list(run_on_actors(embed, PARTS, actors=actors))


def test_a_shipped_bundle_is_the_bundle(
    prompted_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_CACHE", str(tmp_path))
    shipped = ship(prompted_bundle)
    folder = shipped.unpack()
    assert folder.is_relative_to(tmp_path)
    assert folder.name == prompted_bundle.name

    def contents(root: Path) -> dict[str, bytes]:
        return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}

    assert contents(folder) == contents(prompted_bundle)
    written = (folder / "manifest.txt").stat().st_mtime_ns
    assert shipped.unpack() == folder
    assert (folder / "manifest.txt").stat().st_mtime_ns == written
    assert ship(prompted_bundle).sha256 == shipped.sha256


def test_another_bundle_has_another_folder(
    tiny_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_EMBED_CACHE", str(tmp_path / "cache"))
    manifest = tiny_copy / "manifest.txt"
    text = manifest.read_text(encoding="utf-8")
    for remark in ("# one\n", "# two\n"):  # of the same size
        manifest.write_text(text + remark, encoding="utf-8")
        unpacked = ship(tiny_copy).unpack()
        assert unpacked.joinpath("manifest.txt").read_text(encoding="utf-8").endswith(remark)


def test_a_bundle_that_leads_elsewhere_is_not_shipped(tiny_copy: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of another folder", encoding="utf-8")
    (tiny_copy / "more").symlink_to(secret)
    with pytest.raises(BundleError, match=r"more: leads out of the bundle"):
        ship(tiny_copy)


def test_what_is_no_bundle_is_not_shipped(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"no manifest|manifest\.txt"):
        ship(tmp_path)


def test_a_cache_that_cannot_be_written_is_named(
    prompted_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NPU_EMBED_CACHE", str(tmp_path / "file"))
    with pytest.raises(BundleError, match=r"file/ray/.*NPU_EMBED_CACHE"):
        ship(prompted_bundle).unpack()


def test_a_batch_without_the_column_is_named(prompted_bundle: Path) -> None:
    actor = NpuActor(prompted_bundle, "emulated", column="body")
    with pytest.raises(InputError, match=r"no column 'body', it has n, text"):
        actor({"text": np.array(["a"]), "n": np.array([1])})


def test_columns_and_prompt_are_those_named(embedder: Embedder, prompted_bundle: Path) -> None:
    actor = NpuActor(
        prompted_bundle, "emulated", column="body", embedding_column="v", prompt="Other"
    )
    batch = actor({"body": np.array(["a", "b"], dtype=object), "n": np.array([1, 2])})
    assert sorted(batch) == ["body", "n", "v"]
    np.testing.assert_array_equal(batch["v"], embedder.embed(["a", "b"], "Other"))


def test_connecting_twice_changes_nothing() -> None:
    connect()
    connect("nowhere:1")  # connected already
    assert ray.is_initialized()


def rows_of(folder: Path, *, bad: bool = False) -> Path:
    """A file of TEXTS; where bad, one row of it has no text."""
    path = folder / "rows.jsonl"
    rows: list[dict[str, object]] = [{"id": i, "text": text} for i, text in enumerate(TEXTS)]
    if bad:
        rows[33]["text"] = 33
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def test_a_batch_job_on_actors_makes_the_same_bytes(embedder: Embedder, tmp_path: Path) -> None:
    inputs = (str(rows_of(tmp_path, bad=True)),)
    jobs = [
        Job(inputs, tmp_path / name / "all.parquet", shard_rows=7, on_error="skip")
        for name in ("alone", "cluster")
    ]
    for job in jobs:
        job.output.parent.mkdir()
    alone = run(embedder, jobs[0])
    before = embedder.stats.texts
    cluster = run(embedder, jobs[1], engines=on_cluster(embedder, actors=2))
    assert embedder.stats.texts == before
    assert replace(cluster, output=alone.output) == alone
    assert (alone.rows, alone.skipped) == (59, 1)
    written = [
        {path.name: path.read_bytes() for path in job.output.parent.iterdir()} for job in jobs
    ]
    assert sorted(written[0]) == ["all.parquet", "all.parquet.skipped.jsonl"]
    assert written[0] == written[1]


def test_a_batch_job_that_stops_on_actors_goes_on_alone(embedder: Embedder, tmp_path: Path) -> None:
    source = rows_of(tmp_path)
    job = Job((str(source),), tmp_path / "all.npy", shard_rows=10)
    cluster = on_cluster(embedder, actors=1)

    def two_shards(work: Anything, shards: Iterable[Anything]) -> Generator[Anything, None, None]:
        yield from islice(cluster(work, shards), 2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(embedder, job, engines=two_shards)
    done = run(embedder, job)
    assert (done.rows, done.kept) == (60, 20)
    wanted = np.concatenate([embedder.embed(part) for part in PARTS])
    np.testing.assert_array_equal(np.load(job.output), wanted)


def test_a_bad_row_stops_a_batch_job_on_actors(embedder: Embedder, tmp_path: Path) -> None:
    job = Job((str(rows_of(tmp_path)),), tmp_path / "all.npy", truncate=False, shard_rows=10)
    long = (tmp_path / "rows.jsonl").read_text(encoding="utf-8").replace("33 cats", "cats " * 500)
    (tmp_path / "rows.jsonl").write_text(long, encoding="utf-8")
    with pytest.raises(InputError, match=r"rows\.jsonl:34: .*tokens"):
        run(embedder, job, engines=on_cluster(embedder, actors=1))


def test_a_cluster_of_other_machines_gets_the_bundle_shipped(
    embedder: Embedder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert on_cluster(embedder).keywords["bundle"] == embedder.bundle.path  # type: ignore[attr-defined]
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    shipped = on_cluster(embedder).keywords["bundle"]  # type: ignore[attr-defined]
    monkeypatch.setenv("NPU_EMBED_CACHE", str(tmp_path))
    assert shipped.unpack().is_relative_to(tmp_path)


def test_the_command_line_runs_a_batch_on_actors(
    embedder: Embedder, prompted_bundle: Path, tmp_path: Path
) -> None:
    output = tmp_path / "all.npy"
    done = commandline.run(
        "batch", str(rows_of(tmp_path)), "-o", str(output), "--bundle", str(prompted_bundle),
        "--device", "emulated", "--shard-rows", "10", "--ray-actors", "2", "--json", "--ray",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert json.loads(done.out)["stats"] == {"bundle": "tiny-bert", "device": "emulated"}
    wanted = np.concatenate([embedder.embed(part) for part in PARTS])
    np.testing.assert_array_equal(np.load(output), wanted)
