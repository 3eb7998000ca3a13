"""What a tokenizer.json may do, checked before the library reads it and before it is given a text.

The file is a stranger's. A chain of replacements that double a letter is a few hundred bytes and
makes gigabytes of one character; and where the library fails an assertion of its own while it reads
a file, some versions (0.23) end the process.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import tokenizers

from .errors import BundleError
from .jsontext import check_values
from .records import shown

# What one character of a text may become before its tokens are looked up, and the end of a text,
# which an expression may match too: published tokenizers stay below 150. The first of Unicode's own
# forms (NFKD and the like) is not counted: it makes 18 of one at most.
MAX_GROWTH = 256

# How many characters the added tokens may become, which the library normalizes when it reads them.
MAX_ADDED_CHARACTERS = 1 << 24

_FORMS = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18}  # the most that each makes of one

# A file in which none of these stands needs no second reader: nothing but nothing is given as
# prefix, no added token is normalized, and no key is written in another way. To read the largest
# published file takes 0.6 s.
_A_PREFIX = re.compile(rb'"continuing_subword_prefix"\s*:(?!\s*(?:null|""))')
_A_NORMALIZED = re.compile(rb'"normalized"\s*:\s*true')
_AN_ESCAPED_LETTER = re.compile(rb"\\u00(?:5f|6[1-9a-f]|7[0-9a])", re.IGNORECASE)

Step: TypeAlias = Mapping[str, Any]  # one step of a chain, as the file has it


def check_file(name: str, content: bytes) -> None:
    """Check what a tokenizer file holds that the library would take on trust.

    name begins errors.

    Raises:
        BundleError: it has too many values, or a BPE model that merges what does not begin as
            continuing pieces do, or added tokens that grow out of proportion; or where it may have
            those, it is no JSON, or has a key twice, of which we might look at the other.
    """
    check_values(name, content, "re-export the bundle")
    if not any(p.search(content) for p in (_A_PREFIX, _A_NORMALIZED, _AN_ESCAPED_LETTER)):
        return
    try:
        values = json.loads(content.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{name}: {error}, wanted a tokenizer; re-export the bundle.") from error
    if not isinstance(values, dict):
        return  # the library refuses it
    _check_added(name, values)
    model = values.get("model")
    prefix = model.get("continuing_subword_prefix") if isinstance(model, dict) else None
    merges = model.get("merges") if isinstance(model, dict) else None
    if not prefix or not isinstance(prefix, str) or not isinstance(merges, list):
        return
    for merge in merges:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        second = pair[-1] if isinstance(pair, list) and pair else None
        if isinstance(second, str) and not second.startswith(prefix):
            raise BundleError(
                f"{name}: merge of {shown(second)}, wanted what begins with "
                f"continuing_subword_prefix {shown(prefix)}; re-export the bundle."
            )


def _check_added(name: str, values: dict[str, Any]) -> None:
    """Check what the library's normalizer would make of the added tokens.

    Raises:
        BundleError: too much. The library raises, as it does over the whole file, where it cannot
            read the normalizer.
    """
    added = values.get("added_tokens")
    normalizer = values.get("normalizer")
    if not isinstance(added, list) or normalizer is None:
        return
    bare = {"version": "1.0", "added_tokens": [], "normalizer": normalizer, "model": _NO_MODEL}
    growth = _checked_growth(name, tokenizers.Tokenizer.from_str(json.dumps(bare)))
    contents = [one.get("content") for one in added if isinstance(one, dict)]
    characters = growth * sum(1 + len(content) for content in contents if isinstance(content, str))
    if characters > MAX_ADDED_CHARACTERS:
        raise BundleError(
            f"{name}: added_tokens may become {characters} characters, wanted at most "
            f"{MAX_ADDED_CHARACTERS}; re-export the bundle."
        )


_NO_MODEL = {"type": "WordLevel", "vocab": {}, "unk_token": ""}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key for the second time")
    return made


def check_tokenizer(name: str, tokenizer: tokenizers.Tokenizer) -> None:
    """Check that a tokenizer gives a text its own tokens once, in proportion, and always the same.

    name begins errors.

    Raises:
        BundleError: it may let a text grow out of proportion, adds it to itself or leaves it out,
            or draws lots.
    """
    _checked_growth(name, tokenizer)
    for step in _steps(tokenizer.post_processor, "processors"):
        if step["type"] == "TemplateProcessing":
            times = sum("Sequence" in piece for piece in step["single"])
            if times != 1:
                raise BundleError(
                    f"{name}: post_processor has the text {times} times, wanted it once; "
                    "re-export the bundle."
                )
    dropout = getattr(tokenizer.model, "dropout", None)
    if dropout:
        raise BundleError(
            f"{name}: model dropout {dropout:g}, wanted none: the same text must have the same "
            "tokens; re-export the bundle."
        )


def _checked_growth(name: str, tokenizer: tokenizers.Tokenizer) -> int:
    """How many characters are looked up for one of a text, at most."""
    growth = 1
    for part, factor in _factors(tokenizer):
        growth *= factor
        if growth > MAX_GROWTH:
            raise BundleError(
                f"{name}: {part} makes up to {growth} characters of one, wanted at most "
                f"{MAX_GROWTH}; re-export the bundle."
            )
    return growth


def _factors(tokenizer: tokenizers.Tokenizer) -> Iterator[tuple[str, int]]:
    """(part of the file, the most characters that a step of it makes of one), in their order."""
    forms = 0
    for step in _steps(tokenizer.normalizer, "normalizers"):
        forms += step["type"] in _FORMS
        if forms != 1 or step["type"] not in _FORMS:
            yield "normalizer", _growth(step)
    for step in _steps(tokenizer.pre_tokenizer, "pretokenizers"):
        yield "pre_tokenizer", _prefixed_growth(step)
    # Where a piece is not in the vocabulary, BPE looks up each byte of it, these included.
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        affix = getattr(tokenizer.model, key, None) or ""
        yield f"model's {key}", 1 + len(affix.encode())


def _steps(chain: object, key: str) -> Iterator[Step]:
    """The single steps of a normalizer or the like, which may be a Sequence of Sequences."""
    if chain is not None:
        state: bytes = chain.__getstate__()  # type: ignore[attr-defined]
        yield from _flat(json.loads(state), key)


def _flat(step: Step, key: str) -> Iterator[Step]:
    if step["type"] == "Sequence":
        for inner in step[key]:
            yield from _flat(inner, key)
    else:
        yield step


def _growth(step: Step) -> int:
    """The most characters that a normalizer makes of one, the end of a text counted as one."""
    match step["type"]:
        case "Replace":
            pattern, content = step["pattern"].get("String"), len(step["content"])
            if not pattern:  # nothing, as an expression may, matches between any two characters
                return 1 + content
            return max(1, -(-content // len(pattern)))
        case "Prepend":  # before each part of a text between special tokens
            return 1 + len(step["prepend"])
        case "ByteLevel":
            return 4
        case "BertNormalizer":  # spaces around a Chinese character, the three parts of a Korean one
            return 3
        case "Lowercase":
            return 2  # of the dotted capital I
        case "Precompiled":
            return _longest(step["precompiled_charsmap"])
        case form:
            return _FORMS.get(form, 1)


def _prefixed_growth(step: Step) -> int:
    """The most characters that a pre-tokenizer makes of one, which may be a piece by itself."""
    match step["type"]:
        case "ByteLevel":
            return 5 if step["add_prefix_space"] else 4
        case "Metaspace":
            return 1 if step["prepend_scheme"] == "never" else 2
    return 1


def _longest(charsmap: str) -> int:
    """The longest replacement in sentencepiece's table of them, in characters.

    The table: the size of a trie in 4 bytes, the trie, and the replacements with a NUL behind each.
    """
    try:
        table = base64.b64decode(charsmap)
    except binascii.Error:
        return 1  # the library has refused it
    replacements = table[4 + int.from_bytes(table[:4], "little") :].decode("utf-8", "replace")
    return max(1, *map(len, replacements.split("\0")))
