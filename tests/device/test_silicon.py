"""Whether the contract suite ran on hardware: skipped, with the reason, where it did not."""

from __future__ import annotations

import pytest
from boards import Xrt


@pytest.mark.npu
def test_there_is_an_npu(npu: Xrt) -> None:
    assert npu.enumerate_devices() >= 1
    assert npu.device(0).get_info(npu.xrt_info_device.name)
