"""Shards, the files they become, and the folder those are in."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

import filelock
import numpy as np
import pytest

from npu_embed import InputError, OutputError
from npu_embed.batch import shards
from npu_embed.batch.folder import WorkFolder, new_file
from npu_embed.batch.row import Row
from npu_embed.batch.shards import Content, Record, Skipped, Store, Totals, cut_shards
from npu_embed.driver import Xrt as Anything

CONTENT = Content(
    np.arange(6, dtype=np.float16).reshape(2, 3),
    np.array([0, 2], dtype=np.int64),
    np.array([-1, 7], dtype=np.int64),
    b'{"text": "a"}\n',
)
RECORD = Record(2, (Skipped(1, "a.jsonl:2", "id", "text is float"),), 9, 1)


def rows(*texts: str) -> list[Row]:
    return [Row("", text, {}) for text in texts]


@pytest.mark.parametrize(
    ("lengths", "wanted"),
    [
        ([], []),
        ([1] * 7, [3, 3, 1]),
        ([1] * 6, [3, 3]),
        ([9, 1, 9, 1, 1, 1], [2, 2, 2]),
        ([99, 1, 1, 1], [1, 3]),
    ],
)
def test_shards_have_so_many_rows_or_characters(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], wanted: list[int]
) -> None:
    monkeypatch.setattr(shards, "SHARD_CHARACTERS", 10)
    found = list(cut_shards(rows(*("x" * n for n in lengths)), 3))
    assert [len(s.rows) for s in found] == wanted
    assert [s.index for s in found] == list(range(len(found)))
    assert [s.first for s in found] == [sum(wanted[:i]) for i in range(len(found))]


def test_a_stored_shard_is_read_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.record(3) is None
    store.save(3, CONTENT, RECORD)
    assert store.record(3) == RECORD
    assert RECORD.input_rows == 3
    np.testing.assert_array_equal(store.tensor(3, shards.EMBEDDING), CONTENT.embedding)
    assert store.tensor(3, shards.ID).tolist() == [-1, 7]
    assert store.tensor(3, shards.COLUMNS).tobytes() == CONTENT.columns
    assert [p.name for p in tmp_path.iterdir()] == ["shard-00000003.safetensors"]


def test_totals_count_shards_and_list_those_with_rows() -> None:
    totals = Totals()
    totals.add(0, RECORD)
    totals.add(1, Record(0, RECORD.skipped, 0, 0))
    assert totals == Totals(2, 2, 2, 9, 1, [0])


@pytest.mark.parametrize("left", [0, 4, 100, -1])
def test_a_damaged_shard_counts_as_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, left: int
) -> None:
    store = Store(tmp_path)
    store.save(0, CONTENT, RECORD)
    whole = store.path(0).read_bytes()
    store.path(0).write_bytes(whole[:left])
    with caplog.at_level(logging.WARNING):
        assert store.record(0) is None
    assert "computed again" in caplog.text


@pytest.mark.parametrize("at", [300, -1])
def test_a_shard_with_another_byte_counts_as_missing(tmp_path: Path, at: int) -> None:
    store = Store(tmp_path)
    store.save(0, CONTENT, RECORD)
    whole = bytearray(store.path(0).read_bytes())
    whole[at] ^= 1
    store.path(0).write_bytes(whole)
    assert store.record(0) is None


def test_rows_with_much_beside_their_text_make_shorter_shards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shards, "SHARD_CHARACTERS", 10)
    found = list(cut_shards([Row("", "x", {}, size=6) for _ in range(5)], 3))
    assert [len(s.rows) for s in found] == [2, 2, 1]


def full(*args: object) -> None:
    """What a full disk does."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_named_and_what_was_stored_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    store.save(0, CONTENT, RECORD)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match=r"shard-00000001.*No space left on device, wanted"):
        store.save(1, CONTENT, RECORD)
    assert store.record(0) == RECORD
    assert store.record(1) is None


# --- the work folder ----------------------------------------------------------------------------


def test_the_folder_is_beside_the_output_and_goes_when_it_is_empty(tmp_path: Path) -> None:
    with WorkFolder.locked(tmp_path / "out.npy") as work:
        assert work.path == tmp_path / "out.npy.partial"
        assert work.path.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_a_job_that_was_begun_is_kept(tmp_path: Path) -> None:
    with WorkFolder.locked(tmp_path / "out.npy") as work:
        assert work.job() is None
        work.begin({"dim": "3"})
    with WorkFolder.locked(tmp_path / "out.npy") as work:
        assert work.job() == {"dim": "3"}
        work.clear()
        assert work.job() is None
    assert list(tmp_path.iterdir()) == []


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    output = tmp_path / "out.npy"
    with (
        WorkFolder.locked(output),
        pytest.raises(InputError, match="another process is writing it"),
        WorkFolder.locked(output),
    ):
        pass
    with WorkFolder.locked(output):
        pass


def test_a_lock_on_a_file_that_was_removed_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the process before finishes between our opening of the lock and our taking it."""
    output, lock = tmp_path / "out.npy", tmp_path / "out.npy.partial" / "lock"
    taken: list[int] = []
    real = filelock.FileLock.acquire

    def acquire(self: Anything, *args: Anything, **options: Anything) -> Anything:
        found = real(self, *args, **options)
        taken.append(lock.stat().st_ino)
        if len(taken) == 1:
            lock.rename(lock.with_name("gone"))
            lock.touch()
        return found

    monkeypatch.setattr(filelock.FileLock, "acquire", acquire)
    with WorkFolder.locked(output):
        assert len(taken) == 2
        assert taken[0] != taken[1]


def test_what_is_not_ours_is_not_removed(tmp_path: Path) -> None:
    output = tmp_path / "out.npy"
    (tmp_path / "out.npy.partial").mkdir()
    (tmp_path / "out.npy.partial" / "thesis.txt").write_text("all of it")
    with WorkFolder.locked(output) as work:
        work.begin({})
        Store(work.path).save(0, CONTENT, RECORD)
        work.clear()
    assert [p.name for p in (tmp_path / "out.npy.partial").iterdir()] == ["thesis.txt"]


def test_a_new_file_follows_no_link_even_one_that_is_made_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, name = tmp_path / "victim", tmp_path / "shard.tmp"
    victim.write_text("a thesis")
    name.symlink_to(victim)
    with new_file(name) as file:
        file.write(b"ours")
    assert (name.read_text(), name.is_symlink()) == ("ours", False)
    real = Path.unlink

    def replaced(self: Path, **options: bool) -> None:
        real(self, **options)
        self.symlink_to(victim)

    monkeypatch.setattr(Path, "unlink", replaced)
    with pytest.raises(FileExistsError):
        new_file(name)
    assert victim.read_text() == "a thesis"


def test_a_note_that_is_damaged_is_none(tmp_path: Path) -> None:
    work = WorkFolder(tmp_path)
    (tmp_path / "job.json").write_text("{")
    assert work.job() is None


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (lambda p: None, "none: no such folder"),
        (lambda p: p.write_text(""), "none: no such folder"),
    ],
)
def test_a_folder_that_is_not_there_is_named(
    tmp_path: Path, broken: Callable[[Path], object], words: str
) -> None:
    broken(tmp_path / "none")
    with (
        pytest.raises(OutputError, match=words),
        WorkFolder.locked(tmp_path / "none" / "out.npy"),
    ):
        pass


def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with (
        pytest.raises(OutputError, match=r"out.npy.partial: Permission denied, wanted to write"),
        WorkFolder.locked(tmp_path / "out.npy"),
    ):
        pass
