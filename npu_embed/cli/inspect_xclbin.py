"""An xclbin as a description (JSON as it is) and as tables."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..emulator import program, xclbin
from .output import print_table

if TYPE_CHECKING:
    from rich.console import Console


def describe(path: Path, container: xclbin.Xclbin) -> dict[str, Any]:
    """Everything the engine reads of an xclbin, and its sections."""
    partition = container.partition
    return {
        "kind": "xclbin",
        "path": str(path),
        "uuid": container.uuid,
        "interface_uuid": container.interface_uuid,
        "platform": container.vbnv,
        "mode": container.mode,
        "version": ".".join(map(str, container.version)),
        "sections": [{**asdict(s), "kind_name": s.kind_name} for s in container.sections],
        "kernels": [_kernel(container, kernel) for kernel in container.kernels],
        "memories": [asdict(memory) for memory in container.memories],
        "partition": None if partition is None else _partition(partition),
    }


def array_program(pdi: xclbin.Pdi) -> dict[str, Any] | None:
    """The array program a PDI names, with its constants; None where it holds code for real cores.

    A damaged program counts as one that is not there: the emulated NPU says why it cannot run it.
    """
    try:
        return program.read_constants(pdi.image)
    except program.NoArrayProgram:
        return None


def program_text(constants: dict[str, Any] | None) -> str:
    """An array program as a table shows it."""
    if constants is None:
        return "code for real cores"
    rest = " ".join(f"{key}={value}" for key, value in constants.items() if key != "program")
    return f"{constants.get('program')} ({rest})"


def show(out: Console, described: dict[str, Any]) -> None:
    """Print a description as tables."""
    head = ("uuid", "interface_uuid", "platform", "version", "mode")
    title = f"{described['path']}: xclbin"
    print_table(out, title, ("", ""), ((key, str(described[key])) for key in head))
    print_table(
        out,
        "sections",
        ("section", "name", "offset", "bytes"),
        (
            (s["kind_name"], s["name"], s["offset_bytes"], s["size_bytes"])
            for s in described["sections"]
        ),
    )
    for kernel in described["kernels"]:
        kernel_id = kernel["dpu_kernel_id"]
        dpu = "no DPU kernel" if kernel_id is None else f"DPU kernel {kernel_id:#x}"
        instances = ", ".join(kernel["instances"]) or "none"
        print_table(
            out,
            f"kernel {kernel['name']}: {dpu}, instances {instances}",
            ("argument", "name", "type", "kind", "offset", "bytes", "memories"),
            (
                (
                    a["index"],
                    a["name"],
                    a["type"],
                    "global" if a["qualifier"] else "scalar",
                    a["offset_bytes"],
                    a["size_bytes"],
                    " ".join(map(str, a["connections"])),
                )
                for a in kernel["args"]
            ),
        )
    print_table(
        out,
        "memories",
        ("memory", "tag", "type", "used", "KiB", "base address"),
        (
            (m["index"], m["tag"], m["type"], str(m["used"]), m["size_kb"], hex(m["base_address"]))
            for m in described["memories"]
        ),
    )
    _show_partition(out, described["partition"])


def _show_partition(out: Console, partition: dict[str, Any] | None) -> None:
    if partition is None:
        out.print("no AIE partition: nothing an NPU can run", markup=False)
        return
    starts = ", ".join(map(str, partition["start_columns"]))
    print_table(
        out,
        f"AIE partition {partition['name']}: {partition['column_width']} columns from {starts}",
        ("PDI", "bytes", "DPU kernels", "program"),
        (
            (
                pdi["uuid"],
                pdi["size_bytes"],
                " ".join(f"{k:#x}" for k in pdi["dpu_kernel_ids"]),
                program_text(pdi["array_program"]),
            )
            for pdi in partition["pdis"]
        ),
    )


def _kernel(container: xclbin.Xclbin, kernel: xclbin.KernelInfo) -> dict[str, Any]:
    pdi = container.pdi(kernel)
    return {**asdict(kernel), "pdi": None if pdi is None else pdi.uuid}


def _partition(partition: xclbin.Partition) -> dict[str, Any]:
    return {
        "name": partition.name,
        "column_width": partition.column_width,
        "start_columns": list(partition.start_columns),
        "ops_per_cycle": partition.ops_per_cycle,
        "pdis": [
            {
                "uuid": pdi.uuid,
                "size_bytes": len(pdi.image),
                "dpu_kernel_ids": list(pdi.dpu_kernel_ids),
                "array_program": array_program(pdi),
            }
            for pdi in partition.pdis
        ],
    }
