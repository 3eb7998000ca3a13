"""Xclbins, contexts and kernels: what they say of themselves and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from boards import Design, Loaded, Xrt

INVALID = "Invalid argument"
SCALAR = 0xFFFF
MORE_THAN_THERE_ARE_SLOTS = 40


def test_an_xclbin_lists_kernels_and_memories(xrt: Xrt, design: Design) -> None:
    file = xrt.xclbin(str(design.xclbin))
    (kernel,) = [k for k in file.get_kernels() if k.get_name() == design.kernel]
    assert kernel.get_num_args() >= 3 + len(design.inputs) + 1
    tags = [m.get_tag() for m in file.get_mems()]
    assert [m.get_index() for m in file.get_mems()] == list(range(len(tags)))
    assert "HOST" in tags
    assert "SRAM" in tags
    assert all(m.get_size_kb() > 0 for m in file.get_mems() if m.get_used())


def test_a_uuid_is_its_text(xrt: Xrt, device: Xrt, design: Design) -> None:
    file = xrt.xclbin(str(design.xclbin))
    registered = device.register_xclbin(file)
    assert registered.to_string() == file.get_uuid().to_string()
    assert len(registered.to_string()) == 36
    assert file.get_uuid() != file.get_uuid(), "compare texts: objects are equal to none but itself"


def test_a_missing_xclbin_is_named(xrt: Xrt, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"No such file '.*/nope\.xclbin'"):
        xrt.xclbin(str(tmp_path / "nope.xclbin"))
    with pytest.raises(RuntimeError, match="x"):  # a name longer than file systems have
        xrt.xclbin("x" * 5000)


def test_a_file_that_is_no_xclbin_is_refused(xrt: Xrt, tmp_path: Path) -> None:
    path = tmp_path / "text.xclbin"
    path.write_bytes(b"not an xclbin, but long enough for a header" * 20)
    with pytest.raises(RuntimeError, match="Invalid xclbin"):
        xrt.xclbin(str(path))


def test_an_xclbin_is_opened_by_a_path_in_a_str(xrt: Xrt, design: Design) -> None:
    for wrong in (design.xclbin, 3, None):
        with pytest.raises(TypeError):
            xrt.xclbin(wrong)


def test_its_axlf_has_no_python_form(xrt: Xrt, design: Design) -> None:
    with pytest.raises(TypeError):
        xrt.xclbin(str(design.xclbin)).get_axlf()


def test_an_unknown_uuid_makes_no_context(xrt: Xrt, device: Xrt) -> None:
    text = "12345678-1234-1234-1234-123456789012"
    with pytest.raises(RuntimeError, match=f"No xclbin with uuid '{text}': {INVALID}"):
        xrt.hw_context(device, xrt.uuid(text))


@pytest.mark.parametrize("string", ["0000:99:00.1", "junk"])
def test_an_unknown_device_is_refused(xrt: Xrt, string: str) -> None:
    with pytest.raises(RuntimeError, match=f"Invalid device string '{string}': {INVALID}"):
        xrt.device(string)


def test_a_device_that_is_not_there_is_refused(xrt: Xrt) -> None:
    with pytest.raises(RuntimeError):
        xrt.device(999)


def test_an_empty_context_is_no_error_by_itself(xrt: Xrt) -> None:
    xrt.hw_context()


@pytest.mark.parametrize("arguments", [(3,), ("device", "uuid"), (None, None)])
def test_a_context_takes_a_device_and_an_xclbin(xrt: Xrt, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError):
        xrt.hw_context(*arguments)


def test_an_unknown_kernel_is_named(xrt: Xrt, loaded: Loaded) -> None:
    with pytest.raises(RuntimeError, match=f"No such kernel 'NOPE': {INVALID}"):
        xrt.kernel(loaded.context, "NOPE")


def test_an_unknown_instance_is_named(xrt: Xrt, loaded: Loaded) -> None:
    name = f"{loaded.design.kernel}:{{x}}"
    with pytest.raises(RuntimeError, match=f"No compute units matching '{name}'"):
        xrt.kernel(loaded.context, name)


def test_a_kernel_is_found_by_context_and_name_only(xrt: Xrt, loaded: Loaded) -> None:
    for wrong in ((), (loaded.context,), (loaded.context, 3), (None, loaded.design.kernel)):
        with pytest.raises(TypeError):
            xrt.kernel(*wrong)


def test_a_group_is_a_bank_and_the_contexts_handle(loaded: Loaded) -> None:
    kernel = loaded.kernel
    assert kernel.group_id(0) & 0xFFFF == SCALAR
    assert kernel.group_id(1) & 0xFFFF == 1
    assert kernel.group_id(2) & 0xFFFF == SCALAR
    assert kernel.group_id(3) & 0xFFFF == 0
    handles = {kernel.group_id(i) >> 16 & 0xFF for i in range(4)}
    assert len(handles) == 1
    assert handles.pop() >= 1


@pytest.mark.parametrize("index", [99, -1])
def test_a_group_of_no_argument_is_an_index_error(loaded: Loaded, index: int) -> None:
    with pytest.raises(IndexError):
        loaded.kernel.group_id(index)


def test_contexts_have_handles_of_their_own(xrt: Xrt, device: Xrt, design: Design) -> None:
    first, second = Loaded(xrt, device, design), Loaded(xrt, device, design)
    assert first.kernel.group_id(3) != second.kernel.group_id(3)


def test_a_dropped_context_frees_its_slot_at_once(xrt: Xrt, device: Xrt, design: Design) -> None:
    uuid = device.register_xclbin(xrt.xclbin(str(design.xclbin)))
    for _ in range(MORE_THAN_THERE_ARE_SLOTS):
        context = xrt.hw_context(device, uuid)
        xrt.kernel(context, design.kernel)
        del context


def test_a_kernel_keeps_its_context(xrt: Xrt, loaded: Loaded) -> None:
    run = loaded.run()
    del loaded.context, loaded.kernel
    run.start()
    assert run.wait() == xrt.ert_cmd_state.ERT_CMD_STATE_COMPLETED
    assert loaded.result() == loaded.design.wanted


def test_two_contexts_take_turns(xrt: Xrt, device: Xrt, design: Design) -> None:
    both = [Loaded(xrt, device, design) for _ in range(2)]
    runs = [loaded.run() for loaded in both]
    for _ in range(2):
        for loaded, run in zip(both, runs, strict=True):
            loaded.clear()
            run.start()
            assert run.wait() == xrt.ert_cmd_state.ERT_CMD_STATE_COMPLETED
            assert loaded.result() == design.wanted
