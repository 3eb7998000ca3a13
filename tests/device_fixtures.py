"""The contract suite's devices: the emulated NPU, and the real one where there is one.

Each test that asks for `xrt` runs on the emulated NPU, and on the real one where pyxrt can be
imported or an NPU is required; where not, a single test says so by being skipped.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

import pytest
from boards import Design, Loaded, Xrt, copying_design

EMULATED, NPU = "emulated", "npu"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run what asks for `xrt` on every device there may be."""
    if "xrt" in metafunc.fixturenames:
        backends = [pytest.param(EMULATED)]
        if metafunc.config.getoption("--require-npu") or importlib.util.find_spec("pyxrt"):
            backends.append(pytest.param(NPU, marks=pytest.mark.npu))
        metafunc.parametrize("xrt", backends, indirect=True)


def _no_npu(config: pytest.Config, reason: str) -> None:
    """Skip for this reason, or fail where an NPU is required."""
    if config.getoption("--require-npu"):
        pytest.fail(f"--require-npu: {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture
def npu(request: pytest.FixtureRequest) -> Xrt:
    """The real pyxrt, with a device."""
    try:
        module = importlib.import_module("pyxrt")
    except ImportError as error:
        _no_npu(request.config, f"no pyxrt for this Python: {error}")
    if module.enumerate_devices() == 0:
        _no_npu(request.config, "pyxrt sees no device")
    return module


@pytest.fixture
def xrt(request: pytest.FixtureRequest) -> Xrt:
    """A module with pyxrt's API, and a device behind it."""
    if request.param == NPU:
        return request.getfixturevalue("npu")
    return importlib.import_module("npu_embed.emulator.pyxrt")


@pytest.fixture
def device(xrt: Xrt) -> Xrt:
    """The device."""
    return xrt.device(0)


@pytest.fixture
def design(request: pytest.FixtureRequest, xrt: Xrt, tmp_path: Path) -> Design:
    """A kernel that copies."""
    if xrt.__name__ != "pyxrt":
        return copying_design(tmp_path)
    xclbin, insts = (request.config.getoption(f"--npu-{name}") for name in ("xclbin", "insts"))
    if not xclbin or not insts:
        _no_npu(request.config, "no compiled kernel: --npu-xclbin and --npu-insts name one")
    size = request.config.getoption("--npu-bytes")
    content = bytes(i * 7 % 251 for i in range(size))
    kernel = xrt.xclbin(xclbin).get_kernels()[0].get_name()
    return Design(Path(xclbin), kernel, Path(insts).read_bytes(), {3: content}, 4, content)


@pytest.fixture
def loaded(xrt: Xrt, device: Xrt, design: Design) -> Loaded:
    """The copying kernel in a context, its buffers filled."""
    return Loaded(xrt, device, design)
