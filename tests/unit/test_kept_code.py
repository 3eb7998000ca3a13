"""Machine code kept in the cache folder: whole, made once, and nobody else's."""

from __future__ import annotations

import ast
import logging
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from npu_embed.emulator.llvm import kept

PACKAGE = Path(kept.__file__).parents[2]


class Compiler:
    """Makes other code each time, so that what was kept is told from what is made anew."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> bytes:
        self.times += 1
        return b"code %d" % self.times


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NPU_EMBED_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / kept.FOLDER


@pytest.fixture
def make() -> Compiler:
    return Compiler()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_code_is_made_once_for_what_it_depends_on(folder: Path, make: Compiler) -> None:
    assert [kept.kept(["a"], make) for _ in range(2)] == [b"code 1"] * 2
    assert kept.kept(["b"], make) == b"code 2"
    assert kept.kept(["a", "b"], make) == b"code 3"
    assert kept.kept(["a"], make) == b"code 1"
    assert len(list(folder.iterdir())) == 3


def test_code_of_other_sources_is_not_used(
    folder: Path, make: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert kept.kept(["a"], make) == b"code 1"
    changed = tmp_path / "changed.py"
    changed.write_text("another epilogue\n")
    before = kept.sources()
    monkeypatch.setattr(kept, "sources", lambda: [*before[:-1], changed])
    assert kept.kept(["a"], make) == b"code 2"


def imports(file: Path) -> set[Path]:
    """The files of this package that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = file.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            names = [base, *(base / alias.name for alias in node.names)]
            found |= {path.with_suffix(".py") for path in names if path.with_suffix(".py").exists()}
    return found


def test_all_that_the_code_is_made_of_is_among_the_sources() -> None:
    """What is left out could change, and code of before would go on computing as it did."""
    seen, new = set[Path](), {Path(kept.__file__).with_name("module.py")}
    while new:
        seen |= new
        new = {path for file in new for path in imports(file)} - seen
    assert len(seen) > 5
    assert seen <= set(kept.sources())
    assert all(path.is_relative_to(PACKAGE) for path in seen)


Spoil = Callable[[Path], object]


SPOILED: dict[str, Spoil] = {
    "empty": lambda file: file.write_bytes(b""),
    "a byte short": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "no checksum": lambda file: file.write_bytes(file.read_bytes()[:-32]),
    "a bit flipped": lambda file: file.write_bytes(b"C" + file.read_bytes()[1:]),
    "more behind": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
    "huge": lambda file: os.truncate(file, 1 << 40),
    "others may write": lambda file: file.chmod(0o646),
    "the group may write": lambda file: file.chmod(0o664),
}


@pytest.mark.parametrize("how", SPOILED)
def test_a_file_that_is_not_what_was_written_is_made_anew(
    folder: Path, make: Compiler, how: str
) -> None:
    assert kept.kept(["a"], make) == b"code 1"
    (file,) = folder.iterdir()
    SPOILED[how](file)
    assert kept.kept(["a"], make) == b"code 2"
    assert kept.kept(["a"], make) == b"code 2", "kept in the spoiled one's place"
    assert [path.name for path in folder.iterdir()] == [file.name]


def test_code_under_anothers_name_is_not_used(folder: Path, make: Compiler) -> None:
    kept.kept(["a"], make)
    (first,) = folder.iterdir()
    kept.kept(["b"], make)
    (second,) = set(folder.iterdir()) - {first}
    second.write_bytes(first.read_bytes())
    assert kept.kept(["b"], make) == b"code 3"


def test_what_is_no_regular_file_is_not_opened_through_or_waited_for(
    folder: Path, make: Compiler, tmp_path: Path
) -> None:
    kept.kept(["a"], make)
    (file,) = folder.iterdir()
    elsewhere = tmp_path / "elsewhere"
    file.rename(elsewhere)  # whole and ours, but a link could lead to what another may change
    file.symlink_to(elsewhere)
    assert kept.kept(["a"], make) == b"code 2"
    assert elsewhere.read_bytes().startswith(b"code 1")
    file.unlink()
    os.mkfifo(file)
    assert kept.kept(["a"], make) == b"code 3"
    file.unlink()
    file.mkdir()
    before = open_files()
    assert [kept.kept(["a"], make) for _ in range(2)] == [b"code 4", b"code 5"]
    assert open_files() == before
    assert [path.name for path in folder.iterdir()] == [file.name]


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775, 0o757])
def test_a_folder_that_others_may_write_to_is_not_used(
    folder: Path, make: Compiler, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    kept.kept(["a"], make)
    folder.chmod(mode)
    assert kept.kept(["a"], make) == b"code 2"
    assert kept.kept(["b"], make) == b"code 3"
    assert len(list(folder.iterdir())) == 1, "nothing is written there either"
    (said, _) = caplog.records
    assert said.levelno == logging.WARNING
    assert f"{folder}: mode {mode:03o}, owner {os.geteuid()}, wanted a folder" in said.message
    assert "NPU_EMBED_CACHE" in said.message


def test_a_link_to_a_folder_is_not_followed(folder: Path, make: Compiler, tmp_path: Path) -> None:
    kept.kept(["a"], make)
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert kept.kept(["a"], make) == b"code 2"
    assert kept.kept(["b"], make) == b"code 3"
    assert len(list((tmp_path / "elsewhere").iterdir())) == 1


@pytest.mark.parametrize("whose", ["folder", "file"])
def test_another_users_folder_or_file_is_not_used(
    folder: Path, make: Compiler, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    kept.kept(["a"], make)
    looked_at = os.fstat
    kind = {"folder": stat.S_IFDIR, "file": stat.S_IFREG}[whose]

    def anothers(file: int) -> os.stat_result:
        found = list(looked_at(file))
        if stat.S_IFMT(int(found[0])) == kind:
            found[4] = 1001
        return os.stat_result(found)

    monkeypatch.setattr(os, "fstat", anothers)
    assert kept.kept(["a"], make) == b"code 2"


def test_roots_folder_may_be_read(
    folder: Path, make: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an image that was made by root and is used by somebody else."""
    kept.kept(["a"], make)
    looked_at = os.fstat

    def roots(file: int) -> os.stat_result:
        found = list(looked_at(file))
        found[4] = 0
        return os.stat_result(found)

    monkeypatch.setattr(os, "fstat", roots)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert kept.kept(["a"], make) == b"code 1"


def test_what_is_kept_is_for_its_owner_to_write(folder: Path, make: Compiler) -> None:
    before = os.umask(0)
    try:
        kept.kept(["a"], make)
    finally:
        os.umask(before)
    (file,) = folder.iterdir()
    assert (folder.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o755, 0o644)
    assert kept.kept(["a"], make) == b"code 1"


def test_code_is_made_each_time_where_it_cannot_be_kept(
    tmp_path: Path, make: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NPU_EMBED_CACHE", str(tmp_path / "file"))
    assert [kept.kept(["a"], make) for _ in range(2)] == [b"code 1", b"code 2"]


def test_a_full_disk_leaves_nothing_behind(
    folder: Path, make: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        assert kept.kept(["a"], make) == b"code 1"
    assert list(folder.iterdir()) == []
    assert [kept.kept(["a"], make) for _ in range(2)] == [b"code 2"] * 2


def test_what_cannot_be_compiled_leaves_nothing_behind(folder: Path) -> None:
    def fail() -> bytes:
        raise ValueError("LLVM says no")

    before = open_files()
    with pytest.raises(ValueError, match="LLVM says no"):
        kept.kept(["a"], fail)
    assert list(folder.iterdir()) == []
    assert open_files() == before


def test_threads_that_write_the_same_read_whole_code(folder: Path) -> None:
    code = bytes(range(256)) * 200
    found: list[bytes] = []

    def work() -> None:
        for n in range(60):
            found.append(kept.kept([str(n % 3)], lambda: code))
            if n % 5 == 0:
                for file in folder.glob("*.o"):
                    file.unlink(missing_ok=True)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 240
    assert set(found) == {code}
    assert all(file.suffix == ".o" for file in folder.iterdir())


_PROCESS = """
import sys
from npu_embed.emulator.llvm.kept import kept
for n in range(50):
    assert kept([str(n % 3)], lambda: b"x" * 30_000) == b"x" * 30_000
"""


@pytest.mark.slow
def test_processes_that_write_the_same_read_whole_code(folder: Path) -> None:
    processes = [subprocess.Popen([sys.executable, "-c", _PROCESS]) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert len(list(folder.iterdir())) == 3
