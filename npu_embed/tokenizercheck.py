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

# How many characters one of a text may become by replacements: published tokenizers stay below 100.
# Unicode's own forms (NFKD and the like) are not counted: they make 18 of one at most, once.
MAX_GROWTH = 256

# A file in which neither stands needs no second reader: nothing but nothing is given as prefix, and
# no key is written in another way. To read the largest published file takes 0.6 s.
_A_PREFIX = re.compile(rb'"continuing_subword_prefix"\s*:(?!\s*(?:null|""))')
_AN_ESCAPED_LETTER = re.compile(rb"\\u00(?:5f|6[1-9a-f]|7[0-9a])", re.IGNORECASE)

Step: TypeAlias = Mapping[str, Any]  # one normalizer or post-processor, as the file has it


def check_file(name: str, content: bytes) -> None:
    """Check what a tokenizer file holds that the library would take on trust.

    name begins errors.

    Raises:
        BundleError: it has too many values, or a BPE model that merges what does not begin as
            continuing pieces do; or where it may have one, it is no JSON, or has a key twice, of
            which we might look at the other.
    """
    check_values(name, content, "re-export the bundle")
    if not (_A_PREFIX.search(content) or _AN_ESCAPED_LETTER.search(content)):
        return
    try:
        values = json.loads(content.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{name}: {error}, wanted a tokenizer; re-export the bundle.") from error
    model = values.get("model") if isinstance(values, dict) else None
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
    growth = 1
    for step in _steps(tokenizer.normalizer, "normalizers"):
        growth *= _growth(step)
        if growth > MAX_GROWTH:
            raise BundleError(
                f"{name}: normalizer makes up to {growth} characters of one, wanted at most "
                f"{MAX_GROWTH}; re-export the bundle."
            )
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


def _steps(chain: object, key: str) -> Iterator[Step]:
    """The single steps of a normalizer or post-processor, which may be a Sequence of Sequences."""
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
    """The most characters that a normalizer makes of one."""
    match step["type"]:
        case "Replace":
            pattern, content = step["pattern"], len(step["content"])
            if "String" not in pattern:  # an expression may match between any two characters
                return 1 + content
            return max(1, -(-content // max(1, len(pattern["String"]))))
        case "Prepend":  # before each part of a text between special tokens
            return 1 + len(step["prepend"])
        case "ByteLevel":
            return 4
        case "Precompiled":
            return _longest(step["precompiled_charsmap"])
    return 1


def _longest(charsmap: str) -> int:
    """The longest replacement in sentencepiece's table of them, in bytes.

    The table: the size of a trie in 4 bytes, the trie, and the replacements with a NUL behind each.
    """
    try:
        table = base64.b64decode(charsmap)
    except binascii.Error:
        return 1  # the library has refused it
    return max(1, *map(len, table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")))
