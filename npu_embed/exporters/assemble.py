"""A family's params, tensors, references and kernels put together: the parts of a bundle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from ..records import Record, hex_text, make_param, make_record
from .checkpoint import Checkpoint
from .kernels import GEMM_CTX, Kernels, Mha
from .parts import Parts
from .selfcheck import References
from .xclbins import KERNEL_NAME, gemm_xclbin, mha_xclbin


def assemble(
    checkpoint: Checkpoint,
    params: Mapping[str, str | int | float],
    tensors: Mapping[str, NDArray[Any]],
    *,
    references: References,
    kernels: Kernels,
    mhas: Sequence[Mha],
    bf16: frozenset[str] = frozenset(),
) -> Parts:
    """All parts of a bundle, with the checkpoint's prompts and the xclbins the kernels run in."""
    xclbins = {GEMM_CTX: gemm_xclbin()}
    xclbins |= {mha.ctx: mha_xclbin(mha.heads, mha.kv_heads, mha.head_dim) for mha in mhas}
    paths = {ctx: f"kernels/{ctx}.xclbin" for ctx in xclbins}
    records: list[Record] = [make_param(key, value) for key, value in params.items()]
    if checkpoint.default_prompt is not None:
        records.append(make_param("default_prompt", checkpoint.default_prompt))
    records += [
        make_record("prompt", name, hex_text(text)) for name, text in checkpoint.prompts.items()
    ]
    records += references.records
    records += [make_record("xclbin", ctx, path, KERNEL_NAME) for ctx, path in paths.items()]
    records += kernels.records
    return Parts(
        tuple(records),
        {**tensors, **references.tensors},
        {**{path: xclbins[ctx] for ctx, path in paths.items()}, **kernels.files},
        bf16,
    )
