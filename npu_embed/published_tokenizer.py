"""The tokenizer of a published bundle: its tables as a byte-fallback BPE.

What the tables do not say is Gemma's: spaces become U+2581 before the merges, `<bos>` and `<eos>`
stand round every text. Added tokens are taken first, the longest at each place.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from .errors import BundleError
from .manifest import Manifest
from .records import shown
from .tensors import Tensors

VOCAB, OFFSETS, MERGES = "tok.vocab", "tok.vocab_off", "tok.merges"
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
UNKNOWN = "<unk>"
MAX_ADDED = 1 << 16


def read_tokenizer(manifest: Manifest, tensors: Tensors) -> tokenizers.Tokenizer:
    """The tokenizer of a published bundle, which neither cuts nor pads.

    Raises:
        BundleError: a table or a param is missing, or they contradict each other.
    """
    pieces = _pieces(tensors)
    added = _added(manifest, pieces)
    vocab = {piece: i for i, piece in enumerate(pieces) if piece}
    if len(vocab) != sum(map(bool, pieces)):
        twice = next(p for i, p in enumerate(pieces) if p and vocab[p] != i)
        raise _error(tensors, VOCAB, f"piece {shown(twice)} twice", "each once")
    missing = [b for b in (f"<0x{i:02X}>" for i in range(256)) if b not in vocab]
    if missing:
        raise _error(tensors, VOCAB, f"no piece {missing[0]}", "one for each of 256 bytes")
    merges = _merges(tensors, pieces)
    bos, eos = (_special(manifest, pieces, name) for name in ("bos", "eos"))
    return build(vocab, merges, added, bos, eos)


def build(
    vocab: dict[str, int],
    merges: list[tuple[str, str]],
    added: Iterable[str],
    bos: tuple[str, int],
    eos: tuple[str, int],
) -> tokenizers.Tokenizer:
    """Gemma's pipeline over these tables; bos, eos: (piece, id) round every text.

    Source: the tokenizer.json of Hugging Face's Gemma checkpoints.
    """
    unknown = UNKNOWN if UNKNOWN in vocab else None
    made = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    made.normalizer = normalizers.Replace(" ", SPACE)
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    made.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    made.post_processor = processors.TemplateProcessing(
        single=f"{bos[0]} $A {eos[0]}", special_tokens=[bos, eos]
    )
    # The tables do not tell special tokens from other added ones; those in angle brackets are.
    tokens = [
        tokenizers.AddedToken(t, normalized=False, special=t.startswith("<") and t.endswith(">"))
        for t in added
    ]
    made.add_special_tokens([token for token in tokens if token.special])
    made.add_tokens([token for token in tokens if not token.special])
    return made


def _pieces(tensors: Tensors) -> list[str]:
    """The piece of each id; an id without one has an empty piece."""
    content, offsets = tensors.u8(VOCAB, (None,)), tensors.i32(OFFSETS, (None,))
    steps = np.diff(offsets)
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != len(content) or steps.min() < 0:
        raise _error(tensors, OFFSETS, "offsets out of order", f"0 to {len(content)}, ascending")
    data = content.tobytes()
    bounds: list[int] = offsets.tolist()
    try:
        return [data[a:b].decode("utf-8") for a, b in pairwise(bounds)]
    except UnicodeDecodeError as error:
        raise _error(tensors, VOCAB, f"a piece that is not UTF-8 ({error})", "text") from error


def _added(manifest: Manifest, pieces: list[str]) -> list[str]:
    """The added tokens, entered into `pieces` where their id has none."""
    found: list[str] = []
    most = len(pieces) + MAX_ADDED  # of all: pieces grows with each of them
    for record in manifest.tagged("added"):
        index = record.field_int(0, "ID HEX", minimum=0, maximum=most)
        text = record.field_hex(1, "ID HEX")
        if not text:  # no text has it
            continue
        pieces.extend([""] * (index + 1 - len(pieces)))
        if pieces[index] not in ("", text):
            raise record.error(
                f"added {index} is {shown(text)}, wanted {shown(pieces[index])} as {VOCAB} has"
            )
        pieces[index] = text
        found.append(text)
    return found


def _merges(tensors: Tensors, pieces: list[str]) -> list[tuple[str, str]]:
    """(left, right) by rank; of a pair that comes twice the first counts."""
    table: NDArray[np.int32] = tensors.i32(MERGES, (None, 3))
    if len(table) and (table.min() < 0 or table.max() >= len(pieces)):
        raise _error(tensors, MERGES, f"ids {table.min()} to {table.max()}", "ids of pieces")
    found: dict[tuple[str, str], None] = {}
    for rank, (left, right, merged) in enumerate(table.tolist()):
        pair = pieces[left], pieces[right]
        if not all(pair) or pieces[merged] != pair[0] + pair[1]:
            spelled = f"{shown(pair[0])} and {shown(pair[1])} to {shown(pieces[merged])}"
            raise _error(tensors, MERGES, f"merge {rank} of {spelled}", "both, one after the other")
        found.setdefault(pair)
    return list(found)


def _special(manifest: Manifest, pieces: list[str], name: str) -> tuple[str, int]:
    index = manifest.param_int(name, minimum=0, maximum=len(pieces) - 1)
    if not pieces[index]:
        raise BundleError(
            f"{manifest.name}: param {name} is {index}, an id without a piece, wanted one of "
            f"{VOCAB}; re-export the bundle."
        )
    return pieces[index], index


def _error(tensors: Tensors, name: str, found: str, wanted: str) -> BundleError:
    return BundleError(
        f"{tensors.file}: tensor {name}: {found}, wanted {wanted}; re-export the bundle."
    )
