"""Tiny checkpoints of BERT's relatives, and what Hugging Face's code makes of texts with them.

    benchmarks/.venv/bin/python benchmarks/make_tiny_references.py [--out tests/data]

Writes tiny-roberta (BPE), tiny-xlm-roberta (Unigram) and tiny-distilbert (WordPiece): a
sentence-transformers folder each, with references.jsonl (a text a line) and references.safetensors
(`ids.<i>` int32 [tokens], `embeddings` float32 [texts, dim], unit rows), one text at a time in
float32. Needs transformers and torch; benchmarks/compare.py installs both into benchmarks/.venv.

The weights are random and wide on purpose: attention is sharp, and every row of every table, those
of padding too, moves the result.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers

MAX_TOKENS = 64
VOCAB_SIZE = 512
MAX_PIECE = 6  # characters
WIDTH, LAYERS, HEADS, INNER = 64, 3, 4, 160
TABLE_STD, LINEAR_STD, BIAS_STD, NORM_STD = 0.5, 0.17, 0.1, 0.3
DOWN_STD = LINEAR_STD * (WIDTH / INNER) ** 0.5

LINES = (
    "The quick brown fox jumps over the lazy dog.",
    "two cats sleeping on a sofa, and a red car parked outside",
    "How do I reset my password? Open Settings, choose Security, then Reset.",
    "The stock market fell sharply on Monday as investors reacted to the news.",
    "Energy from sunlight drives photosynthesis in plants.",
    "Les chats dorment toute la journée. Die Katze schläft auf dem Sofa.",
    "Привет, как дела? Быстрая рыжая лиса прыгает через ленивую собаку.",
    "今天天气很好，我们去公园散步。量子力学の講義は東京で開かれる。",
    "def add(a, b): return a + b",
    "numbers 3.14159, 1,000,000 and 0xDEADBEEF",
)
TEXTS = (
    *LINES,
    "",
    " ",
    "a",
    "  leading and trailing white space \t\n",
    "ALL CAPS SHOUTING AND lower whispering",
    "café vs cafe\u0301, ﬁne ligatures and ｆｕｌｌ width",
    "emoji: 🐈‍⬛ 👩🏽‍🚀 🇫🇷",
    "مرحبا بالعالم",
    "typed {pad} in a text {pad}{pad} and {unk} and {sep} too",
    "{pad}",
    "Energy from sunlight drives photosynthesis in plants. " * 4,
    "To be, or not to be, that is the question: whether 'tis nobler in the mind " * 12,
)

Special = tuple[str, str, str, str]  # first, pad, last, unknown


@dataclass(frozen=True)
class Tiny:
    """A checkpoint to make: seed, pooling, and the three parts of Hugging Face's it is made of."""

    seed: int
    pooling: str
    config: Callable[[], transformers.PreTrainedConfig]
    model: type[Any]
    tokenizer: Callable[[], tokenizers.Tokenizer]
    special: Special


ROBERTA: Special = ("<s>", "<pad>", "</s>", "<unk>")
BERT: Special = ("[CLS]", "[PAD]", "[SEP]", "[UNK]")


def bpe() -> tokenizers.Tokenizer:
    """RoBERTa's kind: byte-level BPE, white space kept."""
    first, pad, last, unknown = ROBERTA
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[first, pad, last, unknown, "<mask>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.post_processor = processors.RobertaProcessing((last, 2), (first, 0))
    return tokenizer


def unigram() -> tokenizers.Tokenizer:
    """XLM-RoBERTa's kind: NFKC, words behind a ▁, a Unigram model."""
    first, pad, last, unknown = ROBERTA
    normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(tokenizers.Regex(r"\s+"), " ")]
    )
    pre_tokenizer = pre_tokenizers.Metaspace()
    special = [first, pad, last, unknown, "<mask>"]
    counts = pieces(words(normalizer, pre_tokenizer), VOCAB_SIZE - len(special), inside="")
    total = sum(counts.values())
    scores = {piece: math.log(count / total) for piece, count in counts.items()}
    vocabulary = [*((token, 0.0) for token in special), *scores.items()]
    tokenizer = tokenizers.Tokenizer(models.Unigram(vocabulary, unk_id=3, byte_fallback=False))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {last} {last} $B {last}",
        special_tokens=[(first, 0), (last, 2)],
    )
    return tokenizer


def word_piece() -> tokenizers.Tokenizer:
    """DistilBERT's kind: BERT's, lower-cased."""
    first, pad, last, unknown = BERT
    normalizer = normalizers.BertNormalizer(lowercase=True)
    pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = [pad, unknown, first, last, "[MASK]"]
    counts = pieces(words(normalizer, pre_tokenizer), VOCAB_SIZE - len(special), inside="##")
    vocabulary = {piece: i for i, piece in enumerate([*special, *counts])}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token=unknown))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.BertProcessing((last, 3), (first, 2))
    return tokenizer


def words(
    normalizer: normalizers.Normalizer, pre_tokenizer: pre_tokenizers.PreTokenizer
) -> list[str]:
    """The words of LINES as a tokenizer's first two steps give them."""
    lines = map(normalizer.normalize_str, LINES)
    return [word for line in lines for word, _ in pre_tokenizer.pre_tokenize_str(line)]


def pieces(words: list[str], size: int, inside: str) -> dict[str, int]:
    """At most `size` pieces of the words and their counts: all characters, then what saves most.

    A piece that does not begin a word is written behind `inside`. The library's own trainers of
    these two models give another vocabulary each time.
    """
    counts = Counter(
        (inside if start else "") + word[start:end]
        for word in words
        for start in range(len(word))
        for end in range(start + 1, min(start + MAX_PIECE, len(word)) + 1)
    )

    def order(piece: str) -> tuple[bool, int, str]:
        chars = len(piece.removeprefix(inside))
        return chars > 1, -counts[piece] * (chars - 1), piece

    return {piece: counts[piece] for piece in sorted(counts, key=order)[:size]}


def roberta(config: type[Any]) -> Callable[[], transformers.PreTrainedConfig]:
    """A small config of RoBERTa's keys."""
    return lambda: config(
        vocab_size=VOCAB_SIZE,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=INNER,
        max_position_embeddings=MAX_TOKENS + 2,
        type_vocab_size=1,
        layer_norm_eps=1e-5,
    )


def distilbert() -> transformers.PreTrainedConfig:
    """A small config of DistilBERT's keys."""
    return transformers.DistilBertConfig(
        vocab_size=VOCAB_SIZE,
        dim=WIDTH,
        n_layers=LAYERS,
        n_heads=HEADS,
        hidden_dim=INNER,
        max_position_embeddings=MAX_TOKENS,
    )


TINY = {
    "tiny-roberta": Tiny(
        1, "mean", roberta(transformers.RobertaConfig), transformers.RobertaModel, bpe, ROBERTA
    ),
    "tiny-xlm-roberta": Tiny(
        2,
        "cls",
        roberta(transformers.XLMRobertaConfig),
        transformers.XLMRobertaModel,
        unigram,
        ROBERTA,
    ),
    "tiny-distilbert": Tiny(3, "mean", distilbert, transformers.DistilBertModel, word_piece, BERT),
}


def widen(model: torch.nn.Module, seed: int) -> None:
    """Random weights for every parameter, drawn in the order of their names."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        norm, weight = "layernorm" in name.lower().replace("_", ""), name.endswith("weight")
        if "embeddings" in name and not norm:
            parameter.copy_(noise * TABLE_STD)
        elif norm and weight:
            parameter.copy_(1 + noise * NORM_STD)
        elif weight:
            down = parameter.shape == (WIDTH, INNER)
            parameter.copy_(noise * (DOWN_STD if down else LINEAR_STD))
        else:
            parameter.copy_(noise * BIAS_STD)


def write_json(path: Path, value: object) -> None:
    """The value as a JSON file, its folder made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def write_pipeline(folder: Path, tiny: Tiny) -> None:
    """The files that sentence-transformers puts around a model."""
    kinds = (("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize"))
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(kinds)
    ]
    write_json(folder / "modules.json", modules)
    flags = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens"}
    modes = {f"pooling_mode_{flag}": way == tiny.pooling for way, flag in flags.items()}
    write_json(folder / "1_Pooling/config.json", {"word_embedding_dimension": WIDTH, **modes})
    limit = {"max_seq_length": MAX_TOKENS, "do_lower_case": False}
    write_json(folder / "sentence_bert_config.json", limit)


def references(folder: Path, tiny: Tiny, texts: list[str]) -> dict[str, torch.Tensor]:
    """Ids and unit vectors of the texts, each alone, by the checkpoint as it lies in the folder."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = tiny.model.from_pretrained(folder).eval()
    tensors: dict[str, torch.Tensor] = {}
    rows = []
    for i, text in enumerate(texts):
        batch = tokenizer(text, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
        hidden = model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
        ).last_hidden_state[0]
        pooled = hidden[0] if tiny.pooling == "cls" else hidden.mean(dim=0)
        rows.append(torch.nn.functional.normalize(pooled, dim=0))
        tensors[f"ids.{i}"] = batch["input_ids"][0].to(torch.int32)
    return {"embeddings": torch.stack(rows), **tensors}


def make(folder: Path, tiny: Tiny) -> None:
    """One checkpoint with its references, in place of what the folder held."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    first, pad, last, unknown = tiny.special
    model = tiny.model(tiny.config())
    with torch.no_grad():
        widen(model, tiny.seed)
    model.save_pretrained(folder)
    tiny.tokenizer().save(str(folder / "tokenizer.json"))
    named = {"cls_token": first, "pad_token": pad, "sep_token": last, "unk_token": unknown}
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": MAX_TOKENS,
            "model_input_names": ["input_ids", "attention_mask"],
            **named,
        },
    )
    write_pipeline(folder, tiny)
    texts = [text.format(pad=pad, unk=unknown, sep=last) for text in TEXTS]
    with torch.no_grad():
        save_file(references(folder, tiny, texts), folder / "references.safetensors")
    lines = [json.dumps({"text": text}) for text in texts]
    (folder / "references.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for file in folder.glob("*.safetensors"):
        file.chmod(0o644)  # safetensors makes them private


def main() -> None:
    """Make them all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    default = Path(__file__).parent.parent / "tests" / "data"
    parser.add_argument("--out", type=Path, default=default, help="where the folders go")
    out: Path = parser.parse_args().out
    for name, tiny in TINY.items():
        make(out / name, tiny)
        print(out / name)


if __name__ == "__main__":
    main()
