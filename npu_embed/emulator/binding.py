"""What the device reads in a command's packet: the stream, and the buffers it may use."""

from __future__ import annotations

import struct

from . import ert
from .command import Bindings, Command, Window
from .controller import Fault
from .dma import WORD_BYTES
from .flows import Argument
from .memory import Memory
from .xclbin import Argument as KernelArgument

TXN_OPCODE = 3

_UNSET = Memory(0, None)  # an argument nobody set: any access is out of its range


def bindings_of(command: Command) -> Bindings:
    """The command's packet as the device reads it, read once however often it is started.

    Raises:
        Fault: an address that is no buffer of the packet's, or an opcode that is not emulated.
    """
    packet = command.packet
    if packet.bindings is None:
        packet.bindings = _read(command)
    return packet.bindings


def stream_of(bindings: Bindings) -> bytes:
    """The instruction words the device sees, as bytes; kept while the buffer is unchanged.

    Raises:
        Fault: there is no such buffer, or the count beside it is below the stream's own size.
    """
    window = bindings.stream
    if window is None:
        raise Fault(-1, "the run has no instruction buffer")
    memory = window.memory
    version = memory.version  # before the copy: a sync by another thread makes it stale
    key = ("stream", window.offset, window.size)
    kept = memory.derived.get(key)
    if kept is not None and kept[0] == version:
        stream: bytes = kept[1]  # type: ignore[assignment]
    else:
        stream = memory.device[window.offset : window.offset + window.size].tobytes()
        memory.derived[key] = (version, stream)
    _check_count(stream, bindings.count)
    return stream


def _read(command: Command) -> Bindings:
    arguments: list[Argument] = []
    windows: list[Window] = []
    stream: Window | None = None
    count: int | None = None
    for a, value in ert.decode_start(command.kernel.args, command.packet.words):
        if a.qualifier == 0:
            if a.name == "opcode" and value != TXN_OPCODE:
                raise Fault(-1, f"opcode {value} is not emulated, wanted {TXN_OPCODE}")
            if a.name.startswith("ninstr"):
                count = value
            continue
        window = _bound(command, a, value)
        if window is not None:
            windows.append(window)
        if a.name.startswith("instr"):
            stream = window
        else:
            arguments.append(
                Argument(_UNSET, 0, 0)
                if window is None
                else Argument(window.memory, window.offset, window.size)
            )
    return Bindings(stream, count, tuple(arguments), tuple(windows))


def _bound(command: Command, a: KernelArgument, value: int) -> Window | None:
    """The buffer at an argument's address, as the array finds it; None if it was never set.

    Raises:
        Fault: another address than the buffer's, or one that no DMA can start at.
    """
    window = command.packet.windows.get(a.index)
    if window is None and value == 0:
        return None
    if window is None or window.address != value:
        raise Fault(-1, f"address 0x{value:X} of {a.name} is no buffer of this run")
    if value % WORD_BYTES:
        raise Fault(-1, f"address 0x{value:X} of {a.name}, wanted a multiple of {WORD_BYTES}")
    return window


def _check_count(stream: bytes, count: int | None) -> None:
    """Refuse an instruction count below the stream's own size.

    Hosts pass words or bytes, the firmware goes by the stream's header: both are taken, but
    not a count that is too small even in words.
    """
    if count is None or len(stream) < 16:
        return
    (size_bytes,) = struct.unpack_from("<I", stream, 12)
    if count * WORD_BYTES < size_bytes:
        raise Fault(-1, f"ninstr is {count}, the stream has {size_bytes // WORD_BYTES} words")
