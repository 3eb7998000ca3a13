"""A checkpoint's tensors: found by name, checked against the configuration, widened to float32."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..bf16 import to_f32
from ..errors import BundleError
from ..tensors import Tensors, open_safetensors
from .jsonfile import named

F32 = NDArray[np.float32]

_BLOCK_ELEMS = 1 << 22
_ACTION = "download the checkpoint again"

# Checkpoints converted from TensorFlow keep its names; transformers renames them on loading, too.
_OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def _widened(bits: NDArray[Any]) -> F32:
    """Float32 of float32, float16, or the bits of bfloat16."""
    return to_f32(bits) if bits.dtype == np.uint16 else bits.astype(np.float32, copy=False)


class Weights:
    """The tensors a family needs, by their HF names without the model prefix.

    Checks once, when made: every wanted tensor is there, has its shape and is finite, and there is
    none beside them but those `ignored` names.
    """

    def __init__(
        self,
        path: Path,
        wanted: Mapping[str, Sequence[int]],
        *,
        name: str | None = None,
        prefix: str = "",
        ignored: Iterable[str] = (),
    ) -> None:
        """Open path; names in the file may begin with `prefix`; `ignored` are beginnings of names.

        name is what errors call the file, else the path's last part.

        Raises:
            BundleError: naming the tensor that is missing, unknown, misshapen or not finite.
        """
        file = name or path.name
        self._file: Tensors = open_safetensors(path, name=file, action=_ACTION)
        self._stored = self._names(file, prefix)
        ignored = tuple(ignored)
        for stored in self._stored:
            if stored not in wanted and not stored.startswith(ignored):
                raise BundleError(
                    f"{file}: tensor {named(stored)} is not part of this model, wanted only what "
                    "its configuration describes; check config.json."
                )
        for tensor, shape in wanted.items():
            self._check(file, tensor, tuple(shape))

    def _names(self, file: str, prefix: str) -> dict[str, str]:
        """Plain name -> name in the file."""
        stored: dict[str, str] = {}
        for name in self._file.names():
            plain = name.removeprefix(prefix)
            for old, new in _OLD_NAMES.items():
                if plain.endswith(old):
                    plain = plain.removesuffix(old) + new
            if plain in stored:
                raise BundleError(
                    f"{file}: {named(stored[plain])} and {named(name)}, wanted one of "
                    f"the two; {_ACTION}."
                )
            stored[plain] = name
        return stored

    def _check(self, file: str, name: str, shape: tuple[int, ...]) -> None:
        if name not in self._stored:
            raise BundleError(
                f"{file}: tensor {name} is missing, wanted shape {list(shape)}; download the "
                "checkpoint again."
            )
        found = tuple(self._file.shape(self._stored[name]))
        if found != shape:
            raise BundleError(
                f"{file}: tensor {name} has shape {list(found)}, wanted {list(shape)} by "
                "config.json; the two files do not belong together."
            )
        if bad := sum(int((~np.isfinite(block)).sum()) for block in self._blocks(name)):
            raise BundleError(
                f"{file}: tensor {name} has {bad} values that are not finite, wanted none; the "
                "checkpoint is damaged."
            )

    def _bits(self, name: str) -> NDArray[Any]:
        """A tensor as the file has it: float32, float16, or the bits of bfloat16."""
        stored = self._stored[name]
        match self._file.dtype(stored):
            case "f32":
                return self._file.f32(stored)
            case "bf16":
                return self._file.bf16(stored)
            case "f16":
                return self._file.f16(stored)
            case other:
                raise BundleError(
                    f"{self._file.file}: tensor {name} is {other}, wanted f32, f16 or bf16; export "
                    "the checkpoint with float weights."
                )

    def _blocks(self, name: str) -> Iterator[F32]:
        """A tensor's values in float32, a part at a time."""
        flat = self._bits(name).reshape(-1)
        for start in range(0, flat.size, _BLOCK_ELEMS):
            yield _widened(flat[start : start + _BLOCK_ELEMS])

    def f32(self, name: str) -> F32:
        """A tensor in float32, of its own shape; a read-only view where the file has float32."""
        return _widened(self._bits(name))

    def rows(self, name: str, indices: NDArray[np.int32]) -> F32:
        """Some rows of a table in float32, without widening the table."""
        return _widened(self._bits(name)[indices])

    def table(self, name: str) -> NDArray[Any]:
        """A tensor for the bundle: a view of the file's float32 or of its bits of bfloat16.

        float16 is widened to float32: there is no shorter type that the engine reads.
        """
        bits = self._bits(name)
        return bits if bits.dtype == np.uint16 else _widened(bits)

    def close(self) -> None:
        """Unmap the file; views handed out before stay valid."""
        self._file.close()
