"""What is silent garbage on hardware raises on the emulated NPU, and says so."""

from __future__ import annotations

import gc
import logging
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from boards import Loaded, Xrt, copying_design, copying_xclbin
from handmade import pdi

from npu_embed.emulator import pyxrt, xclbin, xclbin_write
from npu_embed.emulator.profile import PROFILES

COMPLETED = pyxrt.ert_cmd_state.ERT_CMD_STATE_COMPLETED
ERROR = pyxrt.ert_cmd_state.ERT_CMD_STATE_ERROR
TIMEOUT = pyxrt.ert_cmd_state.ERT_CMD_STATE_TIMEOUT


@pytest.fixture
def loaded(tmp_path: Path) -> Loaded:
    return Loaded(pyxrt, pyxrt.device(0), copying_design(tmp_path))


def device_of(file: Path) -> tuple[Xrt, Xrt]:
    device = pyxrt.device(0)
    return device, device.register_xclbin(pyxrt.xclbin(str(file)))


def test_an_int_is_no_buffer(loaded: Loaded) -> None:
    with pytest.raises(RuntimeError, match=r"emulated NPU: argument 3 .*is a buffer, got an int"):
        loaded.run().set_arg(3, 0)


def test_a_buffer_is_no_scalar(loaded: Loaded) -> None:
    with pytest.raises(RuntimeError, match=r"emulated NPU: argument 0 .*is a scalar, got a buffer"):
        loaded.run().set_arg(0, loaded.insts)


@pytest.mark.parametrize("value", [True, pyxrt.bo.host_only])
def test_what_merely_converts_to_an_int_is_no_scalar(loaded: Loaded, value: object) -> None:
    with pytest.raises(TypeError):
        loaded.run().set_arg(0, value)


def test_a_buffer_of_another_bank_is_refused(loaded: Loaded) -> None:
    wrong = pyxrt.bo(loaded.device, 64, pyxrt.bo.host_only, loaded.kernel.group_id(1))
    with pytest.raises(RuntimeError, match=r"buffer of argument 3 .*bank 1, connected is bank 0"):
        loaded.run().set_arg(3, wrong)


def test_instructions_in_host_memory_are_refused(loaded: Loaded) -> None:
    wrong = pyxrt.bo(loaded.device, 64, pyxrt.bo.host_only, loaded.kernel.group_id(1))
    with pytest.raises(RuntimeError, match=r"emulated NPU: argument 1 .*bo\.cacheable"):
        loaded.run().set_arg(1, wrong)


def test_a_part_of_a_part_is_refused(loaded: Loaded) -> None:
    part = pyxrt.bo(loaded.bos[3], 128, 64)
    with pytest.raises(RuntimeError, match="emulated NPU: sub-buffer of a sub-buffer"):
        pyxrt.bo(part, 64, 0)


@pytest.mark.parametrize(
    "array",
    [np.arange(32)[::2], np.arange(12).reshape(3, 4).T, np.asfortranarray(np.ones((3, 4)))],
)
def test_a_strided_array_is_not_written(loaded: Loaded, array: np.ndarray) -> None:
    with pytest.raises(RuntimeError, match=r"emulated NPU: bo\.write of a strided array"):
        loaded.bos[3].write(array, 0)


@pytest.mark.parametrize(
    "arguments",
    [
        lambda on: (),
        lambda on: (3, on.insts),
        lambda on: (3, on.insts, 9, *[on.bos[3]] * 6),
    ],
)
def test_a_kernel_called_with_too_few_or_too_many_arguments_does_not_start(
    loaded: Loaded, arguments: object
) -> None:
    assert callable(arguments)
    with pytest.raises(TypeError, match=r"emulated NPU: .* MLIR_AIE takes opcode"):
        loaded.kernel(*arguments(loaded))


@pytest.mark.parametrize("value", [None, "x", 1.5, 2**31])
def test_a_kernel_called_with_what_is_no_argument_does_not_start(
    loaded: Loaded, value: object
) -> None:
    with pytest.raises(TypeError):
        loaded.kernel(3, loaded.insts, value, *loaded.bos.values())


def test_arguments_of_a_running_command_are_not_changed(loaded: Loaded) -> None:
    run = loaded.run()
    run.start()
    with pytest.raises(RuntimeError, match="emulated NPU: set_arg while the command runs"):
        run.set_arg(3, loaded.bos[4])
    run.wait()
    run.set_arg(3, loaded.bos[3])


def test_a_run_dropped_while_its_command_runs_is_an_error(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = loaded.run()
    run.start()
    caught: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: caught.append(str(args.exc_value)))
    del run
    gc.collect()
    assert "a run was dropped while its command runs" in caught[0]
    again = loaded.run()
    again.start()
    assert again.wait() == COMPLETED


def test_an_empty_run_and_a_kernel_of_an_empty_context_raise(loaded: Loaded) -> None:
    for call in (pyxrt.run().start, pyxrt.run().wait, pyxrt.run().state):
        with pytest.raises(RuntimeError, match="emulated NPU: an empty run"):
            call()
    with pytest.raises(RuntimeError, match="emulated NPU: kernel of an empty hw_context"):
        pyxrt.kernel(pyxrt.hw_context(), "MLIR_AIE")


def test_more_buffers_than_the_firmware_takes_are_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xclbin_write, "_MAX_BUFFERS", 8)
    design = copying_design(tmp_path)
    for buffers, says in ((7, None), (8, r"EXEC_CMD IOCTL failed \(err=-22\): Invalid argument")):
        design.xclbin.write_bytes(copying_xclbin(buffers))
        loaded = Loaded(pyxrt, pyxrt.device(0), design)
        run = loaded.run()
        if says is None:
            run.start()
            assert run.wait() == COMPLETED
        else:
            with pytest.raises(RuntimeError, match=says):
                run.start()
            assert run.state() == pyxrt.ert_cmd_state.ERT_CMD_STATE_NEW


# -- what ends in a state -------------------------------------------------------------------------


def end_of(run: Xrt) -> Xrt:
    run.start()
    return run.wait()


@pytest.mark.parametrize("opcode", [0, 1, 2, 4, -1])
def test_another_opcode_is_an_error(loaded: Loaded, opcode: int) -> None:
    run = loaded.run()
    run.set_arg(0, opcode)
    assert end_of(run) == ERROR


@pytest.mark.parametrize("count", [0, 1, 50])
def test_an_instruction_count_below_the_streams_is_an_error(loaded: Loaded, count: int) -> None:
    run = loaded.run()
    run.set_arg(2, count)
    assert end_of(run) == ERROR


def test_an_argument_never_set_is_an_error_where_it_is_used(loaded: Loaded) -> None:
    run = loaded.kernel(3, loaded.insts, 1000, loaded.bos[3], loaded.bos[4])
    assert run.wait() == ERROR
    assert end_of(pyxrt.run(loaded.kernel)) == ERROR


def test_a_view_that_no_dma_can_start_at_is_an_error(loaded: Loaded) -> None:
    root = loaded.buffer(3, bytes(4096))
    run = loaded.run()
    run.set_arg(3, pyxrt.bo(root, 2048, 2))
    assert end_of(run) == ERROR


def test_a_view_one_row_short_is_an_error_and_leaves_other_buffers_alone(loaded: Loaded) -> None:
    size = len(loaded.design.wanted)
    root = loaded.buffer(5, bytes(2 * size))
    loaded.clear()
    run = loaded.run()
    run.set_arg(5, pyxrt.bo(root, size - 32, 0))
    assert end_of(run) == ERROR
    root.sync(loaded.from_device)
    assert bytes(root.map()) == bytes(2 * size)
    assert loaded.result() == bytes(size)


def test_two_views_at_one_address_keep_their_own_sizes(loaded: Loaded) -> None:
    # The second is shorter than what the stream reads of the first.
    root = loaded.bos[3]
    run = loaded.run()
    run.set_arg(6, pyxrt.bo(root, 4, 0))
    assert end_of(run) == COMPLETED
    assert loaded.result() == loaded.design.wanted


def test_an_unknown_operation_names_its_index(loaded: Loaded) -> None:
    broken = bytearray(loaded.design.insts)
    broken[16 + 3 * 24] = 0x77  # the fourth operation
    run = loaded.run(bytes(broken))
    assert end_of(run) == ERROR
    run.start()
    with pytest.raises(RuntimeError) as error:
        run.wait2()
    lines = str(error.value).splitlines()
    assert lines[0] == "Command failed to complete successfully (ERT_CMD_STATE_ERROR)"
    assert "txn_op_idx = 0x00000003" in lines
    assert any(line.startswith("fatal_error_type = 0x") for line in lines)


def test_a_failure_is_logged_with_its_reason(
    loaded: Loaded, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "npu_embed.emulator"):
        end_of(loaded.run(loaded.design.hanging))
    assert "waits for a token of S2MM0 of column 0" in caplog.text


def test_words_of_another_context_are_not_relied_on(loaded: Loaded, tmp_path: Path) -> None:
    words = 16 + 24 * 20  # header, then 4 columns of one core, 5 words each
    bare = bytearray(loaded.design.insts[:16] + loaded.design.insts[words:])
    bare[8:12] = (int.from_bytes(bare[8:12], "little") - 20).to_bytes(4, "little")
    bare[12:16] = len(bare).to_bytes(4, "little")
    assert end_of(loaded.run()) == COMPLETED
    assert end_of(loaded.run(bytes(bare))) == COMPLETED, "nothing ran in between"
    other = Loaded(pyxrt, loaded.device, loaded.design)
    assert end_of(other.run()) == COMPLETED
    assert end_of(loaded.run(bytes(bare))) == TIMEOUT
    assert end_of(loaded.run()) == COMPLETED


# -- xclbins --------------------------------------------------------------------------------------


def test_real_cores_code_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "real.xclbin"
    path.write_bytes(xclbin.build(pdi_image=bytes.fromhex("DD00000044332211") + bytes(400)))
    device, uuid = device_of(path)
    with pytest.raises(RuntimeError, match=r'emulated NPU: .*real AIE cores.*device="npu"'):
        pyxrt.hw_context(device, uuid)


def test_a_program_wider_than_its_partition_is_refused(tmp_path: Path) -> None:
    image = pdi(
        program="gemm",
        columns=4,
        core_rows=1,
        rows_per_core=16,
        k_tile=16,
        n_tile=16,
        rtp_offset=1024,
    )
    path = tmp_path / "narrow.xclbin"
    path.write_bytes(xclbin.build(pdi_image=image, column_width=2))
    device, uuid = device_of(path)
    with pytest.raises(RuntimeError, match=r"emulated NPU: .*partition of 2 columns"):
        pyxrt.hw_context(device, uuid)


def test_a_partition_wider_than_the_array_makes_no_context(tmp_path: Path) -> None:
    path = tmp_path / "wide.xclbin"
    path.write_bytes(xclbin.build(pdi_image=b"x" * 64, column_width=9))
    device, uuid = device_of(path)
    says = r"CREATE_HWCTX IOCTL failed \(err=-22\): Invalid argument"
    with pytest.raises(RuntimeError, match=says):
        pyxrt.hw_context(device, uuid)


def test_a_bad_xclbin_takes_no_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_EMBED_EMU_SLOTS", "1")
    path = tmp_path / "real.xclbin"
    path.write_bytes(xclbin.build(pdi_image=bytes.fromhex("DD00000044332211") + bytes(400)))
    device, uuid = device_of(path)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            pyxrt.hw_context(device, uuid)
    Loaded(pyxrt, device, copying_design(tmp_path))


# -- memory ---------------------------------------------------------------------------------------


def test_a_full_heap_has_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(PROFILES["npu2"], heap_bytes=256 << 10)
    monkeypatch.setitem(PROFILES, "npu2", small)
    loaded = Loaded(pyxrt, pyxrt.device(0), copying_design(tmp_path))
    size, group = 200 << 10, loaded.kernel.group_id(1)
    first = pyxrt.bo(loaded.device, size, pyxrt.bo.cacheable, group)
    says = r"CREATE_BO IOCTL failed \(err=-28\): No space left on device"
    with pytest.raises(RuntimeError, match=says):
        pyxrt.bo(loaded.device, size, pyxrt.bo.cacheable, group)
    pyxrt.bo(loaded.device, size, pyxrt.bo.host_only, loaded.kernel.group_id(3))
    del first
    pyxrt.bo(loaded.device, size, pyxrt.bo.cacheable, group)


@pytest.mark.parametrize("size", [1 << 45, 1 << 62])
def test_more_memory_than_the_machine_has_is_refused_at_once(loaded: Loaded, size: int) -> None:
    with pytest.raises(RuntimeError, match=r"\(err=-12\): Cannot allocate memory"):
        pyxrt.bo(loaded.device, size, pyxrt.bo.host_only, loaded.kernel.group_id(3))
