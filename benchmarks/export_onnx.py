"""A sentence-transformers checkpoint as ONNX graphs that give sentence vectors, for onnxruntime.

    benchmarks/.venv/bin/python benchmarks/export_onnx.py CHECKPOINT OUT

Writes float32.onnx (torch's exporter, pooling and unit length in the graph), int8.onnx (weights of
MatMuls in int8 by column, activations quantized as they come) and tokenizer.json, cut to the
model's limit. Runs in the peers' environment.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from onnxruntime.quantization import QuantType, quantize_dynamic
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer

TEXTS = ["a text", "another text, which is longer"]  # lengths that differ: both axes stay open


class SentenceVectors(torch.nn.Module):  # type: ignore[misc,unused-ignore]
    """Token ids -> sentence vectors, by all modules of the checkpoint."""

    def __init__(self, model: SentenceTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: dict[str, Any]) -> Any:  # noqa: ANN401 (torch's)
        """Sentence vectors [texts, dim] of the tokenizer's output."""
        return self.model(dict(features))["sentence_embedding"]


def export(checkpoint: Path, out: Path) -> None:
    """Write the graphs and the tokenizer into the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    # "eager": plain MatMul and Softmax, which onnxruntime fuses by itself.
    eager = {"attn_implementation": "eager"}
    model = SentenceTransformer(str(checkpoint), device="cpu", model_kwargs=eager)
    features = {
        name: value
        for name, value in model.preprocess(TEXTS).items()
        if isinstance(value, torch.Tensor)
    }
    axes = {0: torch.export.Dim("texts"), 1: torch.export.Dim("tokens")}
    torch.onnx.export(
        SentenceVectors(model).eval(),
        (features, {}),  # a dictionary at the end would be taken for keywords
        str(out / "float32.onnx"),
        input_names=list(features),
        output_names=["vectors"],
        dynamic_shapes=({name: axes for name in features},),
        dynamo=True,
        external_data=False,
    )
    quantize_dynamic(
        str(out / "float32.onnx"),
        str(out / "int8.onnx"),
        per_channel=True,
        weight_type=QuantType.QInt8,
    )
    # As shipped it may cut and pad at another length than the model does.
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    tokenizer.enable_truncation(model.max_seq_length)
    padding = {"pad_id": model.tokenizer.pad_token_id, "pad_token": model.tokenizer.pad_token}
    tokenizer.enable_padding(**padding)
    tokenizer.save(str(out / "tokenizer.json"))


if __name__ == "__main__":
    export(*map(Path, sys.argv[1:]))
