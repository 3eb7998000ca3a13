"""The line in which engines of all processes wait: first come, first served, gone when killed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from rigs import another_process

from npu_embed.waiting import Line, line

STANDS = """
import sys
from pathlib import Path
from npu_embed.waiting import line
with line(Path(sys.argv[1])).stand() as place:
    print(place, flush=True)
    sys.stdin.read()
print("left", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "locks"


def test_whoever_stands_is_seen_until_it_leaves(folder: Path) -> None:
    here = line(folder)
    assert not here.anyone()
    with here.stand():
        assert here.anyone()
    assert not here.anyone()
    with pytest.raises(KeyError), here.stand():
        raise KeyError
    assert not here.anyone()


def test_the_first_to_come_has_nobody_before(folder: Path) -> None:
    here = line(folder)
    with here.stand() as first, here.stand() as second:
        assert first < second
        assert not here.anyone(before=first)
        assert here.anyone(before=second)


def test_two_that_come_at_the_same_time_have_two_places(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = line(folder)
    monkeypatch.setattr(time, "monotonic_ns", lambda: 5)
    with here.stand() as first, here.stand() as second:
        assert (first, second) == (5, 6)


@pytest.mark.parametrize("leaves", ["killed", "by itself"])
def test_other_processes_are_seen_and_stood_behind(folder: Path, leaves: str) -> None:
    here = line(folder)
    with another_process(STANDS, folder) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        place = int(other.stdout.readline())
        assert here.anyone()
        assert not here.anyone(before=place)
        with here.stand() as mine:
            assert mine > place
            assert here.anyone(before=mine)
            if leaves == "killed":
                other.kill()
                other.wait()
            else:
                other.stdin.close()
                assert other.stdout.readline() == "left\n"
            assert not here.anyone(before=mine)


def test_a_place_of_another_process_at_the_same_time_is_not_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with another_process(STANDS, folder) as other:
        assert other.stdout is not None
        place = int(other.stdout.readline())
        monkeypatch.setattr(time, "monotonic_ns", lambda: place)
        with line(folder).stand() as mine:
            assert mine == place + 1


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_stands_nowhere(folder: Path) -> None:
    here = line(folder)
    told, tell = os.pipe()
    reads, writes = os.pipe()
    with here.stand() as place:
        child = os.fork()
        if child == 0:
            seen = here.anyone(), here.anyone(before=place)
            os.write(writes, repr(seen).encode())
            os.read(told, 1)
            os.write(writes, repr(here.anyone()).encode())
            os._exit(0)
        assert os.read(reads, 100) == b"(True, False)", "the parent, which stands first"
    os.write(tell, b"x")
    assert os.read(reads, 100) == b"False", "the parent has left"
    os.waitpid(child, 0)
    for fd in (told, tell, reads, writes):
        os.close(fd)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_that_ends_takes_nobody_out_of_the_line(folder: Path) -> None:
    here = line(folder)
    with here.stand():
        child = os.fork()
        if child == 0:
            with here.stand():
                os._exit(0)
        os.waitpid(child, 0)
        assert here.anyone()
    assert not here.anyone()


def test_the_line_of_a_folder_is_one_however_it_is_spelled(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    assert line(folder) is line(tmp_path / "link" / "locks") is line(folder / ".." / "locks")
    assert line(tmp_path / "other") is not line(folder)


def test_where_the_file_cannot_be_made_a_process_has_its_own_line(folder: Path) -> None:
    folder.write_text("in the way")
    here = Line(folder)
    with here.stand() as first, here.stand() as second:
        assert not here.anyone(before=first)
        assert here.anyone(before=second)
    assert not here.anyone()
    assert folder.read_text() == "in the way"
