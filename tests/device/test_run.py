"""Runs: arguments, states, waiting, time-outs, and a context that lives on after them."""

from __future__ import annotations

import numpy as np
import pytest
from boards import INSTR, NINSTR, OPCODE, Loaded, Xrt

# The device gives up after about 2 s; a wait shorter than that returns first.
SHORT_MS = 50
PATIENCE = 100  # waits of SHORT_MS: more than any device's time-out


def state(xrt: Xrt, name: str) -> Xrt:
    return getattr(xrt.ert_cmd_state, f"ERT_CMD_STATE_{name}")


def wait_out(xrt: Xrt, run: Xrt) -> Xrt:
    """The state a hanging run ends in, by short waits."""
    for _ in range(PATIENCE):
        run.wait(SHORT_MS)
        if int(run.state()) != 3 and run.state() != state(xrt, "SUBMITTED"):
            return run.state()
    raise AssertionError("the device never gave up")


def test_a_run_copies(xrt: Xrt, loaded: Loaded) -> None:
    run = loaded.run()
    assert run.state() == state(xrt, "NEW")
    run.start()
    assert run.wait() == state(xrt, "COMPLETED")
    assert run.state() == state(xrt, "COMPLETED")
    assert loaded.result() == loaded.design.wanted


@pytest.mark.parametrize("arguments", [(), (0,), (1000,)])
def test_wait_takes_no_limit_or_milliseconds(
    xrt: Xrt, loaded: Loaded, arguments: tuple[int, ...]
) -> None:
    run = loaded.run()
    run.start()
    assert run.wait(*arguments) == state(xrt, "COMPLETED")


def test_wait2_returns_nothing_and_takes_nothing(loaded: Loaded) -> None:
    run = loaded.run()
    run.start()
    assert run.wait2() is None
    with pytest.raises(TypeError):
        run.wait2(1000)


def test_a_run_may_be_started_again(xrt: Xrt, loaded: Loaded) -> None:
    run = loaded.run()
    for _ in range(3):
        loaded.clear()
        run.start()
        assert run.wait() == state(xrt, "COMPLETED")
        assert loaded.result() == loaded.design.wanted


def test_a_run_takes_another_buffer_between_its_starts(xrt: Xrt, loaded: Loaded) -> None:
    run = loaded.run()
    run.start()
    run.wait()
    other = loaded.buffer(3, loaded.design.wanted[::-1])
    loaded.clear()
    # Reversed bytes are other bfloat16 numbers; NaN among them may change, the rest may not.
    run.set_arg(3, other)
    run.start()
    run.wait()
    assert loaded.result() != loaded.design.wanted


def test_calling_a_kernel_starts_a_run(xrt: Xrt, loaded: Loaded) -> None:
    buffers = [bo for _, bo in sorted(loaded.bos.items())]
    run = loaded.kernel(OPCODE, loaded.insts, loaded.insts.size() // 4, *buffers)
    assert run.wait() == state(xrt, "COMPLETED")
    assert loaded.result() == loaded.design.wanted


def test_the_instruction_count_may_be_in_bytes(xrt: Xrt, loaded: Loaded) -> None:
    run = loaded.run()
    run.set_arg(NINSTR, loaded.insts.size())
    run.start()
    assert run.wait() == state(xrt, "COMPLETED")


def test_a_view_of_a_larger_buffer_is_an_argument(xrt: Xrt, loaded: Loaded) -> None:
    content = loaded.design.inputs[3]
    root = loaded.buffer(3, bytes(4096) + content + bytes(4096))
    run = loaded.run()
    run.set_arg(3, xrt.bo(root, len(content), 4096))
    run.start()
    assert run.wait() == state(xrt, "COMPLETED")
    assert loaded.result() == loaded.design.wanted


# -- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [1.0, None, "3", b"3", 2**31, -(2**31) - 1, object()])
def test_a_scalar_is_an_int32(loaded: Loaded, value: object) -> None:
    with pytest.raises(TypeError):
        loaded.run().set_arg(0, value)


@pytest.mark.parametrize("value", [3, np.int32(3), np.uint8(3), np.int64(3)])
def test_numpy_integers_are_integers(xrt: Xrt, loaded: Loaded, value: object) -> None:
    run = loaded.run()
    run.set_arg(0, value)
    run.start()
    assert run.wait() == state(xrt, "COMPLETED")


@pytest.mark.parametrize("index", [99, -1])
def test_an_argument_there_is_not_is_an_index_error(loaded: Loaded, index: int) -> None:
    run = loaded.run()
    with pytest.raises(IndexError):
        run.set_arg(index, 3)
    with pytest.raises(IndexError):
        run.set_arg(index, loaded.insts)


def test_a_scalar_out_of_range_names_the_range(loaded: Loaded) -> None:
    says = r"vector::_M_range_check: __n \(which is 99\) >= this->size\(\) \(which is \d+\)"
    with pytest.raises(IndexError, match=says):
        loaded.run().set_arg(99, 3)


def test_callbacks_cannot_be_had_from_python(loaded: Loaded) -> None:
    with pytest.raises(TypeError):
        loaded.run().add_callback(lambda *_: None, None)


def test_a_run_is_made_of_a_kernel(xrt: Xrt) -> None:
    with pytest.raises(TypeError):
        xrt.run(3)
    xrt.run()


# -- what hangs -----------------------------------------------------------------------------------


def test_a_short_wait_returns_before_the_device_gives_up(xrt: Xrt, loaded: Loaded) -> None:
    run = loaded.run(loaded.design.hanging)
    run.start()
    assert run.wait(SHORT_MS) == state(xrt, "TIMEOUT")
    assert run.state() != state(xrt, "TIMEOUT"), "that was the wait's, not the device's"
    assert wait_out(xrt, run) == state(xrt, "TIMEOUT")
    assert run.wait() == state(xrt, "TIMEOUT")


def test_a_wait_without_limit_ends_when_the_device_gives_up(xrt: Xrt, loaded: Loaded) -> None:
    run = loaded.run(loaded.design.hanging)
    run.start()
    assert run.wait() == state(xrt, "TIMEOUT")
    assert run.state() == state(xrt, "TIMEOUT")


def test_wait2_raises_what_the_device_reports(loaded: Loaded) -> None:
    run = loaded.run(loaded.design.hanging)
    run.start()
    says = r"Command failed to complete successfully \(ERT_CMD_STATE_TIMEOUT\)"
    with pytest.raises(RuntimeError, match=says):
        run.wait2()


def test_a_running_command_cannot_be_started_again(xrt: Xrt, loaded: Loaded) -> None:
    run = loaded.run(loaded.design.hanging)
    run.start()
    with pytest.raises(RuntimeError, match="bad command state, can't launch"):
        run.start()
    wait_out(xrt, run)


def test_what_waits_behind_a_hang_is_aborted(xrt: Xrt, loaded: Loaded) -> None:
    hanging = loaded.run(loaded.design.hanging)
    later = [loaded.run() for _ in range(2)]
    hanging.start()
    for run in later:
        run.start()
    assert hanging.wait() == state(xrt, "TIMEOUT")
    assert [run.wait() for run in later] == [state(xrt, "ABORT")] * 2


def test_a_context_is_usable_after_a_hang(xrt: Xrt, loaded: Loaded) -> None:
    hanging = loaded.run(loaded.design.hanging)
    hanging.start()
    wait_out(xrt, hanging)
    loaded.clear()
    good = loaded.run()
    good.start()
    assert good.wait() == state(xrt, "COMPLETED")
    assert loaded.result() == loaded.design.wanted
    hanging.set_arg(INSTR, loaded.insts)
    hanging.start()
    assert hanging.wait() == state(xrt, "COMPLETED")


def test_more_commands_than_the_queue_holds_all_complete(xrt: Xrt, loaded: Loaded) -> None:
    runs = [loaded.run() for _ in range(9)]
    for run in runs:
        run.start()
    assert [run.wait() for run in runs] == [state(xrt, "COMPLETED")] * 9
    assert loaded.result() == loaded.design.wanted
