"""The NPU generations that are emulated: their limits and their driver's manners."""

from __future__ import annotations

import errno
from dataclasses import dataclass

from .. import settings


@dataclass(frozen=True, slots=True)
class Profile:
    """Limits of one NPU generation as its driver reports them.

    `no_slot_errno` is what context creation fails with when every slot is taken: the out-of-tree
    driver says ENOENT, the in-kernel one EINVAL where the firmware refuses. `errno_sign` is how
    the shim prints it.
    """

    name: str
    device_name: str
    dev_gen: int  # as in a stream's header: 3 = AIE2 (NPU1), 4 = AIE2P (NPU2)
    columns: int
    slots: int
    no_slot_errno: int = errno.ENOENT
    errno_sign: int = -1
    tdr_ms: int = 2000
    max_commands: int = 4  # in flight in one context; a further start blocks
    # Arguments in the firmware's message: opcode, instructions, their count and 7 buffers.
    payload_words: int = 19
    heap_bytes: int = 512 << 20
    heap_alignment_bytes: int = 32 << 10


PROFILES = {
    "npu2": Profile("npu2", "Emulated NPU (npu2)", dev_gen=4, columns=8, slots=16),
    "npu1": Profile("npu1", "Emulated NPU (npu1)", dev_gen=3, columns=4, slots=6),
}


def current() -> Profile:
    """The profile the settings ask for."""
    return PROFILES[settings.emulator_profile()]
