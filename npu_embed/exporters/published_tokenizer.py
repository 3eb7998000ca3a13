"""A tokenizer.json as the tables of the published layout, which hold Gemma's kind and no other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import BundleError
from ..records import shown
from .checkpoint import TOKENIZER, Checkpoint
from .jsonfile import JsonFile, has_surrogate, quoted

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
MAX_ID = (1 << 24) - 1  # the models read no longer vocabulary
_ACTION = "the published layout has no other; export in npu-embed's own layout"

# What the layout does not store, and so must be what its readers take for granted.
_NORMALIZER = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
_PRE_TOKENIZER = {
    "type": "Split",
    "pattern": {"String": " "},
    "behavior": "MergedWithPrevious",
    "invert": False,
}
_BPE = {
    "type": "BPE",
    "byte_fallback": True,
    "fuse_unk": True,
    "unk_token": "<unk>",
    "dropout": None,
    "ignore_merges": False,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
}
_ADDED_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


@dataclass(frozen=True, slots=True)
class Tables:
    """A tokenizer as the layout's tables.

    vocab: all pieces' UTF-8; offsets [V + 1]: where each begins, and the end; merges [n, 3]: left,
    right, merged; added: (id, text) of tokens taken before the merges; bos, eos: ids round every
    text.
    """

    vocab: NDArray[np.uint8]
    offsets: NDArray[np.int32]
    merges: NDArray[np.int32]
    added: tuple[tuple[int, str], ...]
    bos: int
    eos: int


def tokenizer_tables(checkpoint: Checkpoint) -> Tables:
    """The tables of a checkpoint's tokenizer.

    Raises:
        BundleError: it does something that the layout cannot say.
    """
    file = JsonFile.read(checkpoint.model_folder, TOKENIZER)
    for key, wanted in (("normalizer", _NORMALIZER), ("pre_tokenizer", _PRE_TOKENIZER)):
        if file.values.get(key) != wanted:
            raise file.error(key, "Gemma's", _ACTION)
    model = file.part("model")
    for key, value in _BPE.items():
        if model.values.get(key) != value:
            raise model.error(key, repr(value), _ACTION)
    ids = _vocab(model)
    added = _added(file)
    pieces = [""] * (max([-1, *ids.values(), *(i for i, _ in added)]) + 1)
    for piece, i in [*ids.items(), *((text, i) for i, text in added)]:
        if pieces[i] not in ("", piece):
            raise BundleError(
                f"{file.name}: id {i} is {shown(pieces[i])} and {shown(piece)}, wanted one; "
                "correct the file."
            )
        if has_surrogate(piece):
            raise BundleError(
                f"{file.name}: id {i} is {shown(piece)}, wanted text that UTF-8 can hold; "
                "correct the file."
            )
        pieces[i] = piece
    encoded = [piece.encode("utf-8") for piece in pieces]
    ends = np.cumsum([0, *map(len, encoded)])
    bos, eos = _bos_eos(file)
    return Tables(
        vocab=np.frombuffer(b"".join(encoded), np.uint8),
        offsets=ends.astype(np.int32),
        merges=_merges(model, ids),
        added=added,
        bos=bos,
        eos=eos,
    )


def _vocab(model: JsonFile) -> dict[str, int]:
    vocab = model.part("vocab").values
    if not all(type(i) is int and 0 <= i <= MAX_ID for i in vocab.values()):
        raise BundleError(f"{model.name}: vocab has an id that is no index; correct the file.")
    return {piece: i for piece, i in vocab.items() if isinstance(i, int)}


def _merges(model: JsonFile, ids: dict[str, int]) -> NDArray[np.int32]:
    merges = model.values.get("merges")
    rows = []
    for merge in merges if isinstance(merges, list) else ():
        pair = merge.split(" ") if isinstance(merge, str) else merge
        two = isinstance(pair, list) and len(pair) == 2 and all(isinstance(p, str) for p in pair)
        if not two or any(p not in ids for p in (*pair, "".join(pair))):
            raise BundleError(
                f"{model.name}: merge {quoted(merge)}, wanted two pieces of vocab that make a "
                "third; correct the file."
            )
        rows.append([ids[pair[0]], ids[pair[1]], ids["".join(pair)]])
    return np.array(rows, np.int32).reshape(-1, 3)


def _added(file: JsonFile) -> tuple[tuple[int, str], ...]:
    tokens = file.values.get("added_tokens")
    found = []
    for values in tokens if isinstance(tokens, list) else ():
        if not isinstance(values, dict):
            raise file.error("added_tokens", "a list of objects", "correct the file")
        token = JsonFile(f"{file.name}: added_tokens", values)
        for flag in _ADDED_FLAGS:
            if token.flag(flag, False):
                raise token.error(flag, "false", _ACTION)
        found.append((token.integer("id", minimum=0, maximum=MAX_ID), token.text("content")))
    return tuple(found)


def _bos_eos(file: JsonFile) -> tuple[int, int]:
    """The ids of the one token before a text, and of the one after it."""
    post = file.part("post_processor")
    template = post.values.get("single") if post.text("type") == "TemplateProcessing" else None
    parts = template if isinstance(template, list) else []
    kinds = [[*part] if isinstance(part, dict) else [] for part in parts]
    if kinds != [["SpecialToken"], ["Sequence"], ["SpecialToken"]]:
        raise file.error("post_processor", "one token before a text and one after it", _ACTION)
    found = []
    for part in (parts[0], parts[2]):
        name = JsonFile(f"{file.name}: post_processor", part).part("SpecialToken").text("id")
        token = post.part("special_tokens", name)
        ids = token.values.get("ids")
        if not isinstance(ids, list) or len(ids) != 1 or ids[0] not in range(MAX_ID + 1):
            raise token.error("ids", "one id", _ACTION)
        found.append(int(ids[0]))
    return found[0], found[1]
