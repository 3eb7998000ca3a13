"""Errors are Python's own classes, as pybind11 makes them of C++'s: nothing of ours to catch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from boards import Loaded, Xrt

Call = Callable[[Xrt, Loaded], object]

RUNTIME_ERRORS: dict[str, Call] = {
    "missing xclbin": lambda xrt, _: xrt.xclbin("/nonexistent.xclbin"),
    "no xclbin": lambda xrt, _: xrt.xclbin(__file__),
    "unknown device": lambda xrt, _: xrt.device("0000:99:00.1"),
    "unknown uuid": lambda xrt, on: xrt.hw_context(on.device, xrt.uuid("0" * 36)),
    "unknown kernel": lambda xrt, on: xrt.kernel(on.context, "NOPE"),
    "unknown instance": lambda xrt, on: xrt.kernel(on.context, on.design.kernel + ":{x}"),
    "normal buffer": lambda xrt, on: xrt.bo(on.device, 64, xrt.bo.normal, 0),
    "p2p buffer": lambda xrt, on: xrt.bo(on.device, 64, xrt.bo.p2p, 0),
    "empty buffer": lambda xrt, on: xrt.bo(on.device, 0, xrt.bo.host_only, 0),
    "write past the end": lambda _, on: on.insts.write(b"x", on.insts.size()),
    "read past the end": lambda _, on: on.insts.read(1, on.insts.size()),
    "part past the end": lambda xrt, on: xrt.bo(on.insts, 4, on.insts.size()),
    "sync past the end": lambda _, on: on.insts.sync(on.to_device, 4, on.insts.size()),
}
INDEX_ERRORS: dict[str, Call] = {
    "group of no argument": lambda _, on: on.kernel.group_id(99),
    "scalar of no argument": lambda _, on: on.run().set_arg(99, 3),
    "buffer of no argument": lambda _, on: on.run().set_arg(99, on.insts),
}
TYPE_ERRORS: dict[str, Call] = {
    "path": lambda xrt, _: xrt.xclbin(Path("x.xclbin")),
    "register": lambda _, on: on.device.register_xclbin("x.xclbin"),
    "info": lambda _, on: on.device.get_info("name"),
    "float": lambda _, on: on.run().set_arg(0, 1.5),
    "direction": lambda _, on: on.insts.sync(0),
    "wait": lambda _, on: on.run().wait("1"),
}


@pytest.mark.parametrize("call", RUNTIME_ERRORS.values(), ids=RUNTIME_ERRORS)
def test_what_xrt_throws_is_a_plain_runtime_error(xrt: Xrt, loaded: Loaded, call: Call) -> None:
    with pytest.raises(RuntimeError) as error:
        call(xrt, loaded)
    assert type(error.value) is RuntimeError


@pytest.mark.parametrize("call", INDEX_ERRORS.values(), ids=INDEX_ERRORS)
def test_out_of_range_is_a_plain_index_error(xrt: Xrt, loaded: Loaded, call: Call) -> None:
    with pytest.raises(IndexError) as error:
        call(xrt, loaded)
    assert type(error.value) is IndexError


@pytest.mark.parametrize("call", TYPE_ERRORS.values(), ids=TYPE_ERRORS)
def test_what_pybind11_cannot_convert_is_a_plain_type_error(
    xrt: Xrt, loaded: Loaded, call: Call
) -> None:
    with pytest.raises(TypeError) as error:
        call(xrt, loaded)
    assert type(error.value) is TypeError


def test_classes_have_the_real_modules_names(xrt: Xrt) -> None:
    for name in ("bo", "device", "hw_context", "kernel", "run", "runlist", "uuid", "xclbin"):
        if hasattr(xrt, name):
            assert getattr(xrt, name).__name__ == name
    assert xrt.bo.flags.__name__ == "flags"
    assert xrt.xclbin.xclbinkernel.__name__ == "xclbinkernel"
    assert xrt.xclbin.xclbinmem.__name__ == "xclbinmem"
