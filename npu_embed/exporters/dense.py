"""sentence-transformers' Dense modules: linear layers on the pooled vector.

Each becomes a GEMM whose rows are texts: dense.0 reads the pooled vectors, each later one the
result of the one before in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..errors import BundleError
from .checkpoint import WEIGHTS, Checkpoint, Module
from .geometry import K_TILE, N_TILE, round_up
from .jsonfile import JsonFile
from .kernels import Gemm
from .limits import MAX_WIDTH
from .weights import F32, Weights

# torch's class by its full name, as sentence-transformers writes it.
_IDENTITY = "torch.nn.modules.linear.Identity"
_POOLED = "sentence_embedding"


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """One Dense module: its folder, and the sizes its config says."""

    folder: Path
    in_features: int
    out_features: int
    bias: bool

    def weights(self) -> tuple[F32, F32 | None]:
        """Weight [out_features, in_features] and bias [out_features] or None.

        Raises:
            BundleError: the file is missing, or is not what the config says.
        """
        name = f"{self.folder.name}/{WEIGHTS}"
        if not (self.folder / WEIGHTS).is_file():
            raise BundleError(
                f"{name}: missing, wanted it; download the whole checkpoint, "
                "or convert its pytorch_model.bin, a pickle, which can run code."
            )
        wanted: dict[str, tuple[int, ...]] = {
            "linear.weight": (self.out_features, self.in_features)
        }
        if self.bias:
            wanted["linear.bias"] = (self.out_features,)
        weights = Weights(self.folder / WEIGHTS, wanted, name=name)
        return weights.f32("linear.weight"), weights.f32("linear.bias") if self.bias else None


def dense_configs(checkpoint: Checkpoint, pooled_width: int) -> tuple[DenseConfig, ...]:
    """The Dense modules after the pooling, in order; only Normalize may follow them.

    Raises:
        BundleError: another order of modules, sizes that do not chain, or an option that this
            engine would compute differently.
    """
    kinds = [module.kind for module in checkpoint.modules]
    if "Normalize" in kinds[:-1]:
        raise BundleError(
            f"modules.json: {', '.join(kinds)} after Pooling, wanted Dense modules and then "
            "Normalize; this exporter knows no other order."
        )
    found: list[DenseConfig] = []
    width = pooled_width
    for module in checkpoint.modules:
        if module.kind == "Dense":
            found.append(_dense(checkpoint.folder, module, width))
            width = found[-1].out_features
    return tuple(found)


def _dense(folder: Path, module: Module, width: int) -> DenseConfig:
    config = JsonFile.read(folder, f"{module.path}/config.json")
    config.choice("activation_function", (_IDENTITY,), default=_IDENTITY)
    for key in ("module_input_name", "module_output_name"):
        config.choice(key, (_POOLED,), default=_POOLED)
    in_features = config.integer("in_features", maximum=MAX_WIDTH)
    if in_features != width:
        raise config.error(
            "in_features", f"{width}, the width of what comes before", "correct the file"
        )
    out_features = config.integer("out_features", maximum=MAX_WIDTH)
    return DenseConfig(folder / module.path, in_features, out_features, config.flag("bias", True))


def dense_gemms(configs: tuple[DenseConfig, ...]) -> tuple[Gemm, ...]:
    """The GEMM `dense.i` of each module."""
    gemms = []
    for i, config in enumerate(configs):
        k, n = round_up(config.in_features, K_TILE), round_up(config.out_features, N_TILE)
        gemms.append(Gemm(f"dense.{i}", K=k, N=n, lda=k, c_stride=n, bias=config.bias))
    return tuple(gemms)
