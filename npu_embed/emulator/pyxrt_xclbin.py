"""pyxrt.uuid and pyxrt.xclbin: a kernel container and its identity."""

from __future__ import annotations

import os
from pathlib import Path

from . import xclbin as container

INVALID_ARGUMENT = "Invalid argument"  # strerror(EINVAL), as XRT appends it


class uuid:
    """An xclbin's identity. Without equality, as in the real module: compare to_string()."""

    def __init__(self, text: str) -> None:
        self._text = str(text)

    def to_string(self) -> str:
        """The uuid's text, lower case with hyphens."""
        return self._text


class xclbin:
    """A kernel container read from a file."""

    class xclbinkernel:
        """A kernel of the xclbin's metadata."""

        def __init__(self, info: container.KernelInfo) -> None:
            self._info = info

        def get_name(self) -> str:
            """The kernel's name in the xclbin's XML."""
            return self._info.name

        def get_num_args(self) -> int:
            """How many arguments it takes."""
            return len(self._info.args)

        def __repr__(self) -> str:
            return f"<xclbinkernel {self._info.name}>"

    class xclbinmem:
        """A memory of the xclbin's topology."""

        def __init__(self, memory: container.Memory) -> None:
            self._memory = memory

        def get_tag(self) -> str:
            """Its name, HOST or SRAM."""
            return self._memory.tag

        def get_base_address(self) -> int:
            """Its first address."""
            return self._memory.base_address

        def get_size_kb(self) -> int:
            """Its size in KiB."""
            return self._memory.size_kb

        def get_used(self) -> bool:
            """Whether a kernel is connected to it."""
            return bool(self._memory.used)

        def get_index(self) -> int:
            """Its index, the bank of a buffer's group."""
            return self._memory.index

    def __init__(self, path: str) -> None:
        if not isinstance(path, str):
            raise TypeError(
                "__init__(): incompatible constructor arguments. The following argument types are "
                "supported:\n    1. pyxrt.xclbin(arg0: str)"
            )
        file = Path(path)
        if not os.path.isfile(file):  # Path.is_file raises where the name is too long
            raise RuntimeError(f"No such file '{path}'")
        try:
            self._parsed = container.parse(file.read_bytes())
        except container.XclbinError as error:
            raise RuntimeError(str(error)) from error
        except OSError as error:
            raise RuntimeError(f"Failed to open file '{path}' for reading: {error}") from error

    def get_kernels(self) -> list[xclbin.xclbinkernel]:
        """The kernels of its metadata."""
        return [xclbin.xclbinkernel(k) for k in self._parsed.kernels]

    def get_mems(self) -> list[xclbin.xclbinmem]:
        """The memories of its topology."""
        return [xclbin.xclbinmem(m) for m in self._parsed.memories]

    def get_uuid(self) -> uuid:
        """Its uuid."""
        return uuid(self._parsed.uuid)

    def get_xsa_name(self) -> str:
        """The platform's name."""
        return self._parsed.vbnv

    def get_axlf(self) -> None:
        """Fail as the real call does, which has no converter for its result."""
        raise TypeError("Unable to convert function return value to a Python type!")
