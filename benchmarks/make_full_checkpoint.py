"""A full-size EmbeddingGemma 2 checkpoint of random weights: the published one needs an account.

    python benchmarks/make_full_checkpoint.py full-embedding-gemma2

Text encoder only, 24 layers, bfloat16, 0.5 GB; the same bytes for the same seed. The tokenizer is
that of the tests' small checkpoint (1,400 pieces: a text has more tokens than in the real one);
speed does not depend on what weights and pieces are, and vectors of two engines can be compared.
transformers, egemma2 and `npu-embed export` all read the folder.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

TINY = Path(__file__).resolve().parents[1] / "tests" / "data" / "tiny-eg2"
COPIED = ("tokenizer.json", "config_sentence_transformers.json", "modules.json")
MAX_TOKENS = 2048
# Scores q k^T of this spread: attention that prefers some keys without seeing only one.
SCORE_STD = 2.0
NORM_STD = 0.1  # norm weights stand about 1
BF16_BYTES = 2
BLOCK_ELEMS = 1 << 22  # random numbers are made in blocks: float32 copies stay small


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a text_config; the defaults are those transformers gives EmbeddingGemma 2."""

    vocab_size: int = 262_144
    hidden_size: int = 512
    intermediate_size: int = 2048
    num_hidden_layers: int = 24
    num_attention_heads: int = 4
    sliding_heads: tuple[int, int] = (2, 256)  # num_key_value_heads, head_dim
    full_heads: tuple[int, int] = (1, 512)
    hidden_size_per_layer_input: int = 512
    embedding_dim: int = 768
    sliding_window: int = 512
    full_every: int = 6

    def is_full(self, layer: int) -> bool:
        """Whether a layer attends to every token: each sixth."""
        return (layer + 1) % self.full_every == 0


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor to be drawn: normal, about `mean`, with standard deviation `std`."""

    name: str
    shape: tuple[int, ...]
    mean: float
    std: float


def linear(name: str, rows: int, columns: int) -> Tensor:
    """A projection's weight that keeps the size of what it multiplies."""
    return Tensor(f"{name}.weight", (rows, columns), 0.0, columns**-0.5)


def norm(name: str, width: int, mean: float = 1.0) -> Tensor:
    """A norm's weight."""
    return Tensor(f"{name}.weight", (width,), mean, NORM_STD * mean)


def tensors(sizes: Sizes) -> Iterator[Tensor]:
    """Every tensor of the text encoder, by transformers' names."""
    root, d = "language_model", sizes.hidden_size
    width = sizes.hidden_size_per_layer_input
    # The encoder multiplies them by sqrt(hidden_size).
    yield Tensor(f"{root}.embed_tokens.weight", (sizes.vocab_size, d), 0.0, d**-0.5)
    yield linear(f"{root}.ple.per_layer_model_projection", sizes.num_hidden_layers * width, d)
    yield norm(f"{root}.ple.per_layer_projection_norm", width)
    for i in range(sizes.num_hidden_layers):
        yield from _layer(sizes, i, f"{root}.layers.{i}")
    yield norm(f"{root}.norm", d)
    yield linear(f"{root}.embedding_projection", sizes.embedding_dim, d)


def _layer(sizes: Sizes, index: int, name: str) -> Iterator[Tensor]:
    d, inner, width = sizes.hidden_size, sizes.intermediate_size, sizes.hidden_size_per_layer_input
    kv_heads, head_dim = sizes.full_heads if sizes.is_full(index) else sizes.sliding_heads
    q_width, kv_width = sizes.num_attention_heads * head_dim, kv_heads * head_dim
    attention = f"{name}.self_attn"
    yield linear(f"{attention}.q_proj", q_width, d)
    yield linear(f"{attention}.k_proj", kv_width, d)
    yield linear(f"{attention}.v_proj", kv_width, d)
    yield linear(f"{attention}.o_proj", d, q_width)
    # Normed q and k have head_dim numbers of size 1, and their product is not scaled.
    for part in ("q", "k"):
        yield norm(f"{attention}.{part}_norm", head_dim, SCORE_STD**0.5 * head_dim**-0.25)
    yield linear(f"{name}.mlp.gate_proj", inner, d)
    yield linear(f"{name}.mlp.up_proj", inner, d)
    yield linear(f"{name}.mlp.down_proj", d, inner)
    for part in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
        yield norm(f"{name}.{part}_layernorm", d)
    yield linear(f"{name}.ple_block.per_layer_input_gate", width, d)
    yield linear(f"{name}.ple_block.per_layer_projection", d, width)
    yield norm(f"{name}.ple_block.post_per_layer_input_norm", d)
    yield Tensor(f"{name}.layer_scalar", (1,), 1.0, 0.0)


def bf16_blocks(tensor: Tensor, rng: np.random.Generator) -> Iterator[bytes]:
    """A drawn tensor's bytes in bfloat16, the upper half of each float32, block by block."""
    left = math.prod(tensor.shape)
    while left:
        block = rng.standard_normal(min(left, BLOCK_ELEMS), dtype=np.float32)
        block *= np.float32(tensor.std)
        block += np.float32(tensor.mean)
        yield (block.view(np.uint32) >> 16).astype("<u2").tobytes()
        left -= len(block)


def write_weights(drawn: Sequence[Tensor], rng: np.random.Generator, path: Path) -> None:
    """A safetensors file of bfloat16 tensors, which safetensors.numpy cannot write.

    Source: the format's description, https://github.com/huggingface/safetensors#format.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in drawn:
        start, end = end, end + BF16_BYTES * math.prod(tensor.shape)
        header[tensor.name] = {
            "dtype": "BF16",
            "shape": tensor.shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in drawn:
            file.writelines(bf16_blocks(tensor, rng))


def config(sizes: Sizes) -> dict[str, Any]:
    """config.json: a text encoder without towers for images and sounds."""
    layers = range(sizes.num_hidden_layers)
    kv_heads, head_dim = sizes.full_heads
    found = json.loads((TINY / "config.json").read_text(encoding="utf-8"))
    text: dict[str, Any] = {
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_hidden_layers": sizes.num_hidden_layers,
        "num_attention_heads": sizes.num_attention_heads,
        "num_key_value_heads": sizes.sliding_heads[0],
        "head_dim": sizes.sliding_heads[1],
        "hidden_size_per_layer_input": sizes.hidden_size_per_layer_input,
        "embedding_dim": sizes.embedding_dim,
        "sliding_window": sizes.sliding_window,
        "max_position_embeddings": 262_144,
        "layer_types": [
            "full_attention" if sizes.is_full(i) else "sliding_attention" for i in layers
        ],
        "per_layer_config": {
            str(i): {"head_dim": head_dim, "num_key_value_heads": kv_heads}
            for i in layers
            if sizes.is_full(i)
        },
    }
    found["text_config"] |= text
    found["dtype"] = "bfloat16"
    found["vision_config"] = found["audio_config"] = None
    # egemma2 wants numbers here, of pieces that no text has.
    found |= {"audio_token_id": 8, "boa_token_id": 9, "eoa_token_index": 10, "video_token_id": 11}
    return dict(found)


# egemma2 reads all of it even for texts; the values are transformers' defaults.
IMAGES = {"patch_size": 16, "pooling_kernel_size": 3}
PROCESSOR = {
    "processor_class": "EmbeddingGemma2Processor",
    "image_processor": {
        "image_processor_type": "Gemma4ImageProcessor",
        "max_soft_tokens": 280,
        **IMAGES,
    },
    "feature_extractor": {
        "feature_extractor_type": "Gemma4AudioFeatureExtractor",
        "feature_size": 128,
        "sampling_rate": 16_000,
        "fft_length": 512,
        "frame_length": 320,
        "hop_length": 160,
        "min_frequency": 0.0,
        "max_frequency": 8000.0,
        "mel_floor": 1e-3,
        "preemphasis": 0.0,
        "preemphasis_htk_flavor": True,
        "input_scale_factor": 1.0,
    },
    "video_processor": {
        "video_processor_type": "EmbeddingGemma2VideoProcessor",
        "max_soft_tokens": 70,
        **IMAGES,
        "fps": 1.0,
        "max_frames": 32,
        "overflow_strategy": "uniform",
        "add_timestamps": False,
    },
}


def fingerprint() -> str:
    """Twelve hex digits that change with what `make` writes by default."""
    described = repr((list(tensors(Sizes())), config(Sizes()), PROCESSOR, MAX_TOKENS))
    return hashlib.sha256(described.encode()).hexdigest()[:12]


def make(out: Path, sizes: Sizes | None = None, seed: int = 0) -> None:
    """Write the checkpoint into the new folder `out`, which appears whole or not at all.

    Raises:
        FileExistsError: out exists.
    """
    sizes = sizes or Sizes()
    if out.exists():
        raise FileExistsError(f"{out}: exists, wanted a new folder; remove it or name another.")
    part = out.with_name(f".{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for name in COPIED:
        shutil.copy(TINY / name, part / name)
    pooling = json.loads((TINY / "1_Pooling/config.json").read_text(encoding="utf-8"))
    pooling["word_embedding_dimension"] = sizes.embedding_dim
    tokenizer = json.loads((TINY / "tokenizer_config.json").read_text(encoding="utf-8"))
    tokenizer["model_max_length"] = MAX_TOKENS
    for name, content in {
        "config.json": config(sizes),
        "processor_config.json": PROCESSOR,
        "preprocessor_config.json": PROCESSOR["image_processor"],
        "sentence_bert_config.json": {"max_seq_length": MAX_TOKENS},
        "tokenizer_config.json": tokenizer,
        "1_Pooling/config.json": pooling,
    }.items():
        (part / name).parent.mkdir(exist_ok=True)
        (part / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    rng = np.random.default_rng(seed)
    write_weights(list(tensors(sizes)), rng, part / "model.safetensors")
    part.rename(out)


def main(argv: Sequence[str] | None = None) -> None:
    """Make the checkpoint from a command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, help="a folder that is not there yet")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:
        make(args.out, seed=args.seed)
    except OSError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
