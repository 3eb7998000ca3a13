import hashlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_embed.errors import BundleError
from npu_embed.manifest import (
    Manifest,
    bundle_path,
    from_records,
    make_param,
    make_record,
    verify_sha256,
    write_records,
)

SMALL = """\
# a bundle
version 1
param family bert
param eps 1e-12
param query  task: x | query:\x20
xclbin gemm kernels/gemm.xclbin MLIR_AIE
future record of=another time
gemm qkv ctx=gemm
gemm o ctx=gemm
"""


def test_the_known_records_are_understood_and_all_are_kept_in_order() -> None:
    manifest = Manifest.parse(SMALL)
    assert manifest.version == 1
    assert manifest.params == {"family": "bert", "eps": "1e-12", "query": " task: x | query: "}
    (gemm,) = manifest.xclbins.values()
    assert (gemm.key, gemm.file, gemm.kernel_name, gemm.line) == (
        "gemm",
        "kernels/gemm.xclbin",
        "MLIR_AIE",
        6,
    )
    assert [r.tag for r in manifest.records] == (
        ["version", "param", "param", "param", "xclbin", "future", "gemm", "gemm"]
    )
    assert [r.fields[0] for r in manifest.tagged("gemm")] == ["qkv", "o"]


def test_bytes_and_text_read_the_same() -> None:
    assert Manifest.parse(SMALL.encode()) == Manifest.parse(SMALL)


def test_a_manifest_written_reads_back_equal() -> None:
    manifest = Manifest.parse(SMALL + f"sha256 a {'0' * 64}\n")
    assert Manifest.parse(write_records(manifest.records)) == manifest
    assert Manifest.parse(write_records(manifest.records)) != Manifest.parse(SMALL)


def test_a_manifest_made_from_records_equals_the_one_read_from_their_text() -> None:
    made = [make_record("version", 1), make_param("dim", 64), make_record("xclbin", "a", "b", "c")]
    assert from_records(made) == Manifest.parse(write_records(made))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("version 1", "m:2: a second version record, wanted one; re-export"),
        ("param", "m:2: param has 0 fields, wanted NAME VALUE"),
        ("param x", "m:2: param has 1 fields, wanted NAME VALUE"),
        ("param x  ", "m:2: param has 1 fields, wanted NAME VALUE"),
        ("param x 1\nparam x 1", "m:3: param x for the second time, wanted it once"),
        ("xclbin a b", "m:2: xclbin has 2 fields, wanted KEY FILE KERNEL_NAME"),
        ("xclbin a b c d", "m:2: xclbin has 4 fields, wanted KEY FILE KERNEL_NAME"),
        ("xclbin a b c\nxclbin a d e", "m:3: xclbin a for the second time, wanted it once"),
        ("sha256 a", "m:2: sha256 has 1 fields, wanted FILE HEX"),
        ("sha256 a 12", "m:2: sha256 is '12', wanted 64 lower-case hex digits"),
        (f"sha256 a {'A' * 64}", "m:2: sha256 is 'AAA"),
        (f"sha256 a {'0' * 64}\n" * 2, "m:3: sha256 a for the second time, wanted it once"),
    ],
)
def test_a_wrong_known_record_is_refused_with_its_line(line: str, message: str) -> None:
    with pytest.raises(BundleError) as info:
        Manifest.parse(f"version 1\n{line}\n", "m")
    assert str(info.value).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "m: no version record, wanted `version 1`; re-export the bundle."),
        ("version 2", "m:1: version 2, this runtime reads 1; re-export the bundle."),
        ("version", "m:1: version has 0 fields, wanted N; re-export the bundle."),
        ("version one", "m:1: version is 'one', wanted an integer"),
        ("version 1 2", "m:1: version has 2 fields, wanted N; re-export the bundle."),
    ],
)
def test_exactly_one_version_is_wanted_and_it_is_ours(text: str, message: str) -> None:
    with pytest.raises(BundleError) as info:
        Manifest.parse(text, "m")
    assert str(info.value).startswith(message)


def test_extra_keys_after_known_fields_are_skipped() -> None:
    manifest = Manifest.parse("version 1 by=x\nxclbin a b c gops=4\n")
    assert manifest.xclbins["a"].kernel_name == "c"


PARAMS = Manifest.parse(
    "version 1\nparam i 12\nparam f 1e-6\nparam on 1\nparam off 0\nparam names a,,b c, d\n"
    "param ints 1,2\nparam word x\nparam tab \t7 \n"
)


def test_params_are_read_by_type() -> None:
    assert PARAMS.param_int("i", minimum=12, maximum=12) == 12
    assert PARAMS.param_int("tab") == 7
    assert PARAMS.param_float("f") == 1e-6
    assert PARAMS.param_float("i") == 12.0
    assert PARAMS.param_flag("on")
    assert not PARAMS.param_flag("off")
    assert PARAMS.param_list("names") == ("a", "b c", "d")
    assert PARAMS.param_ints("ints") == (1, 2)
    assert PARAMS.param_str("word") == "x"


def test_an_absent_param_takes_its_default_and_a_present_one_does_not() -> None:
    assert PARAMS.param_int("absent", 0, minimum=1) == 0
    assert PARAMS.param_float("absent", 0.5) == 0.5
    assert PARAMS.param_flag("absent", False) is False
    assert PARAMS.param_list("absent", ()) == ()
    assert PARAMS.param_str("absent", "") == ""
    assert PARAMS.param_int("i", 0) == 12


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda m: m.param_int("absent"), "manifest.txt: param absent is missing, wanted it; re-"),
        (lambda m: m.param_int("word"), "manifest.txt:8: param word is 'x', wanted an integer"),
        (lambda m: m.param_int("i", maximum=11), "manifest.txt:2: param i is '12', wanted an int"),
        (lambda m: m.param_int("f"), "manifest.txt:3: param f is '1e-6', wanted an integer"),
        (lambda m: m.param_float("word"), "manifest.txt:8: param word is 'x', wanted a finite"),
        (lambda m: m.param_flag("i"), "manifest.txt:2: param i is '12', wanted 0 or 1; re-export"),
        (lambda m: m.param_ints("names"), "manifest.txt:6: param names is 'a', wanted an integer"),
    ],
)
def test_a_wrong_param_is_refused_with_its_line(
    read: Callable[[Manifest], object], message: str
) -> None:
    with pytest.raises(BundleError) as info:
        read(PARAMS)
    assert str(info.value).startswith(message)


@pytest.mark.parametrize("text", ["nan", "inf", "1e999", "1_0", "0x1p3", "1,5", "."])
def test_a_float_is_finite_and_plain(text: str) -> None:
    with pytest.raises(BundleError, match="wanted a finite number"):
        Manifest.parse(f"version 1\nparam f {text}\n").param_float("f")


@given(st.text() | st.binary())
def test_any_content_is_a_manifest_or_a_bundle_error(content: str | bytes) -> None:
    try:
        Manifest.parse(content)
    except BundleError:
        pass


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A bundle folder with one kernel in it, and a file beside it."""
    folder = tmp_path / "bundle"
    (folder / "kernels").mkdir(parents=True)
    (folder / "kernels" / "a.xclbin").write_bytes(b"kernel")
    (tmp_path / "outside").write_bytes(b"secret")
    return folder


def test_a_manifest_is_read_from_its_folder(root: Path) -> None:
    (root / "manifest.txt").write_text(SMALL)
    assert Manifest.read(root) == Manifest.parse(SMALL)


def test_a_folder_without_manifest_is_refused_by_name(root: Path) -> None:
    with pytest.raises(BundleError, match=r"bundle: 'manifest\.txt': no such file, wanted"):
        Manifest.read(root)


def test_a_manifest_over_the_limit_is_refused_without_reading_it_whole(root: Path) -> None:
    with (root / "manifest.txt").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(BundleError, match="16777217 bytes or more, wanted at most 16777216"):
        Manifest.read(root)


def test_a_path_inside_the_bundle_is_found(root: Path) -> None:
    assert bundle_path(root, "kernels/a.xclbin", "m:1").read_bytes() == b"kernel"
    (root / "link").symlink_to("kernels/a.xclbin")
    assert bundle_path(root, "link", "m:1") == (root / "kernels/a.xclbin").resolve()
    (root.parent / "alias").symlink_to(root)
    assert bundle_path(root.parent / "alias", "kernels/a.xclbin", "m:1").is_file()


@pytest.mark.parametrize(
    ("relative", "found"),
    [
        ("", "an empty path"),
        ("../outside", "a path with `..`"),
        ("kernels/../kernels/a.xclbin", "a path with `..`"),
        ("kernels/../../outside", "a path with `..`"),
        ("..\\outside", "a path with `..`"),
        ("/etc/passwd", "an absolute path"),
        ("C:\\kernel", "an absolute path"),
        ("\\\\host\\share\\x", "an absolute path"),
        ("kernels/a.xclbin\0", "a NUL in the path"),
        ("x" * 5000, "a path of 5000 bytes (at most 1024)"),
        ("x" * 1000, "cannot be reached"),
        ("kernels", "not a regular file"),
        (".", "not a regular file"),
        ("absent", "no such file"),
        ("kernels/a.xclbin/b", "cannot be reached"),
        ("out", "a link that leads out of the bundle"),
        ("up/outside", "a link that leads out of the bundle"),
        ("null", "a link that leads out of the bundle"),
        ("loop", "cannot be reached"),
        ("fifo", "not a regular file"),
        ("socket", "not a regular file"),
    ],
)
def test_a_path_that_is_no_file_of_the_bundle_is_refused_before_opening(
    root: Path, relative: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "out").symlink_to("../outside")
    (root / "up").symlink_to("..")
    (root / "null").symlink_to("/dev/null")
    (root / "loop").symlink_to("loop")
    os.mkfifo(root / "fifo")
    monkeypatch.chdir(root)  # the name of a socket has a short limit
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        with pytest.raises(BundleError) as info:
            bundle_path(root, relative, "manifest.txt:7")
    message = str(info.value)
    assert message.startswith("manifest.txt:7: ")
    assert found in message
    assert "wanted a regular file inside the bundle" in message
    assert len(message) < 1500


def test_a_device_inside_the_bundle_is_refused() -> None:
    with pytest.raises(BundleError, match="not a regular file"):
        bundle_path(Path("/dev"), "null", "m:1")


def test_hashes_are_verified_file_by_file(root: Path) -> None:
    right = hashlib.sha256(b"kernel").hexdigest()
    (root / "b").write_bytes(b"changed")
    manifest = Manifest.parse(
        f"version 1\nsha256 kernels/a.xclbin {right}\nsha256 b {right}\nsha256 absent {right}\n"
        f"sha256 ../outside {right}\n"
    )
    good, changed, absent, outside = verify_sha256(root, manifest)
    assert (good.file, good.ok, good.found, good.wanted) == ("kernels/a.xclbin", True, right, right)
    assert (changed.ok, changed.found) == (False, hashlib.sha256(b"changed").hexdigest())
    assert (absent.ok, outside.ok) == (False, False)
    assert absent.found.startswith("manifest.txt:4: 'absent': no such file")
    assert outside.found.startswith("manifest.txt:5: '../outside': a path with `..`")
