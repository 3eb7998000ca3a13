"""The texts whose reference vectors a bundle carries, so that it can be checked where it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import BundleError
from ..records import Record, hex_text, make_record, shown
from ..tokenizer import Tokenizer
from .checkpoint import Checkpoint
from .parts import Progress
from .reference import F32, I32, Reference

_SENTENCE = "A text that is longer than the model can read is cut, and its end is kept. "
_SENTENCE_WORDS = len(_SENTENCE.split())

# A long text's hidden rows are left out where they would be most of the bundle.
MAX_HIDDEN_BYTES = 16 << 20

SHORT_TEXTS = (
    "hello",
    "The quick brown fox jumps over the lazy dog.",
    "",
    "Café déjà vu: naïve façade, Zürich, smørrebrød.",
    "量子力学の講義は東京で開かれる。",
)


def self_check_texts(max_tokens: int) -> tuple[str, ...]:
    """Six texts: a word, a sentence, none, accents, CJK, and one cut at max_tokens."""
    # A word is at least a token, so this many words are certain to be too many.
    return (*SHORT_TEXTS, _SENTENCE * (max_tokens // _SENTENCE_WORDS + 1))


@dataclass(frozen=True, slots=True)
class References:
    """The `tref` or `ref` records of a bundle and their tensors."""

    records: tuple[Record, ...]
    tensors: Mapping[str, NDArray[Any]]

    def joined(self, others: References) -> References:
        """These and then the others."""
        return References((*self.records, *others.records), {**self.tensors, **others.tensors})


def make_references(
    checkpoint: Checkpoint,
    max_tokens: int,
    vocab_size: int,
    forward: Callable[[I32], Reference],
    progress: Progress,
) -> References:
    """The forward of every self-check text, and of one behind the checkpoint's first prompt.

    Raises:
        BundleError: the tokenizer has more tokens than the model, or none for the empty text; or
            the weights give no finite vector.
    """
    tokenizer = Tokenizer.from_file(checkpoint.tokenizer_path, max_tokens=max_tokens)
    if tokenizer.vocab_size > vocab_size:
        raise BundleError(
            f"tokenizer.json: {tokenizer.vocab_size} tokens, wanted at most vocab_size "
            f"{vocab_size} of config.json; the two files do not belong together."
        )
    (empty,) = tokenizer.encode_batch([""])
    if not len(empty.ids):
        raise BundleError(
            "tokenizer.json: no token for the empty text, wanted one or more, as post_processor "
            "adds them; no vector could be made of it."
        )
    cases = [("-", "", text) for text in self_check_texts(max_tokens)]
    for prompt in list(checkpoint.prompts)[:1]:
        cases.append((prompt, checkpoint.prompts[prompt], cases[1][2]))
    tensors: dict[str, NDArray[np.int32] | F32] = {}
    records = []
    for j, (prompt, prefix, text) in enumerate(cases):
        progress("references", j, len(cases))
        (encoded,) = tokenizer.encode_batch([text], prompt=prefix)
        _check_ids(encoded.ids, text, vocab_size)
        with np.errstate(all="ignore"):  # what is not finite at the end is refused
            reference = forward(encoded.ids)
        check_finite(f"text {shown(text)}", reference.hidden, reference.embedding)
        tensors[f"tref.{j}.ids"] = reference.ids
        if reference.hidden.nbytes <= MAX_HIDDEN_BYTES:
            tensors[f"tref.{j}.hidden"] = reference.hidden
        tensors[f"tref.{j}.embedding"] = reference.embedding
        records.append(make_record("tref", j, prompt, hex_text(text)))
    progress("references", len(cases), len(cases))
    return References(tuple(records), tensors)


def _check_ids(ids: I32, text: str, vocab_size: int) -> None:
    """Refuse a tokenizer whose ids are not the model's."""
    # Ids may leave gaps, so that few tokens do not tell that they are small.
    if ids.max() >= vocab_size or ids.min() < 0:
        raise BundleError(
            f"tokenizer.json: id {ids.max() if ids.min() >= 0 else ids.min()} for the text "
            f"{shown(text)}, wanted less than vocab_size {vocab_size} of config.json; the two "
            "files do not belong together."
        )


def check_finite(where: str, *arrays: F32) -> None:
    """Refuse weights that give no finite numbers.

    Raises:
        BundleError: naming the input at which they do not.
    """
    if not all(np.isfinite(array).all() for array in arrays):
        raise BundleError(
            f"model.safetensors: the {where} becomes no finite vector, wanted one; the weights or "
            "the numbers of config.json are damaged."
        )
