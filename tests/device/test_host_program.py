"""A host program in the style of mlir-aie's examples runs unchanged on every device."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from boards import Design, Loaded, Xrt
from numpy.typing import NDArray

PROGRAM = """
import numpy as np
import pyxrt as xrt


def main(xclbin_path, insts_path, kernel_name, inputs, output_size):
    insts = np.fromfile(insts_path, dtype=np.uint32)

    device = xrt.device(0)
    xclbin = xrt.xclbin(xclbin_path)
    name = [k.get_name() for k in xclbin.get_kernels() if k.get_name().startswith(kernel_name)][0]
    device.register_xclbin(xclbin)
    context = xrt.hw_context(device, xclbin.get_uuid())
    kernel = xrt.kernel(context, name)

    bo_instr = xrt.bo(device, len(insts) * 4, xrt.bo.cacheable, kernel.group_id(1))
    bos = [
        xrt.bo(device, array.nbytes, xrt.bo.host_only, kernel.group_id(3 + i))
        for i, array in enumerate(inputs)
    ]
    bo_out = xrt.bo(device, output_size, xrt.bo.host_only, kernel.group_id(3 + len(inputs)))

    bo_instr.write(insts, 0)
    for bo, array in zip(bos, inputs):
        bo.write(array, 0)
    bo_out.write(np.zeros(output_size, dtype=np.uint8), 0)
    for bo in (bo_instr, *bos, bo_out):
        bo.sync(xrt.xclBOSyncDirection.XCL_BO_SYNC_BO_TO_DEVICE)

    opcode = 3
    handle = kernel(opcode, bo_instr, len(insts), *bos, bo_out)
    state = handle.wait()
    if state != xrt.ert_cmd_state.ERT_CMD_STATE_COMPLETED:
        raise SystemExit(f"kernel ended in {state}")

    bo_out.sync(xrt.xclBOSyncDirection.XCL_BO_SYNC_BO_FROM_DEVICE)
    return bo_out.read(output_size, 0).view(np.uint16)
"""


def test_a_host_program_of_the_usual_form_runs_unchanged(
    xrt: Xrt, design: Design, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyxrt", xrt)
    insts = tmp_path / "insts.bin"
    insts.write_bytes(design.insts)
    inputs: list[NDArray[np.uint8]] = [
        np.frombuffer(content, np.uint8) for _, content in sorted(design.inputs.items())
    ]
    namespace: dict[str, object] = {}
    exec(PROGRAM, namespace)
    main = namespace["main"]
    assert callable(main)
    found = main(str(design.xclbin), str(insts), design.kernel, inputs, len(design.wanted))
    assert found.tobytes() == design.wanted


def test_a_mapped_buffer_is_an_array(loaded: Loaded) -> None:
    run = loaded.run()
    run.start()
    run.wait()
    out = loaded.bos[loaded.design.output]
    out.sync(loaded.from_device)
    array = np.frombuffer(out.map(), dtype=np.uint8)[: len(loaded.design.wanted)]
    assert array.flags.writeable
    assert array.tobytes() == loaded.design.wanted
