"""Changes to JSON that leave it JSON: bytes changed at random are mostly no JSON any more."""

from __future__ import annotations

import copy
import json
import random
from typing import Any, TypeAlias

Node: TypeAlias = Any  # what json.loads makes
Path = tuple[str | int, ...]  # from the root: keys of objects, indices of lists

VALUES: tuple[Node, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 64, 2**16, 2**31, 2**32, 2**53, 2**63, 2**64, 10**30),
    *(0.5, -0.0, 1.0, 1e-320, 1e38, 1e300, float("inf"), float("nan")),
    *("", " ", "-", "..", "/", "a/../..", "\0", "\n", "\ud800", "x" * 300, "\N{SNOWMAN}"),
    *([], {}, [[]], [{}], {"": None}, [0] * 9, {"id": 0}, [None], ["a", ["a"]]),
)
GO_ON = 0.8  # how likely it is that a node within is changed rather than the node
LONGEST = 1 << 16  # characters: what is doubled again and again stays below


def changed(rng: random.Random, data: bytes) -> bytes | None:
    """The JSON in data with one node changed; None where there is none.

    It may stand behind a byte, as files chosen by their first byte do, and be a safetensors header,
    whose length is kept true.
    """
    for before in (0, 1):
        for length in (0, 8):
            start = before + length
            end = len(data)
            if length:
                end = start + int.from_bytes(data[before:start], "little")
            if data[start : start + 1] in (b"{", b"[") and end <= len(data):
                text = _changed_text(rng, data[start:end])
                if text is not None:
                    said = len(text).to_bytes(8, "little") if length else b""
                    return data[:before] + said + text + data[end:]
    return None


def _changed_text(rng: random.Random, text: bytes) -> bytes | None:
    try:
        root = json.loads(text)
    except (ValueError, RecursionError):
        return None
    for _ in range(rng.choice((1, 1, 2, 3))):
        root = _changed(rng, root)
    said = json.dumps(root)
    return said.encode() if len(said) <= LONGEST else None


def _changed(rng: random.Random, root: Node) -> Node:
    path = _pick(rng, root)
    if not path:
        return rng.choice((root, root, *VALUES))
    parent = _at(root, path[:-1])
    key, value = path[-1], parent[path[-1]]
    match rng.randrange(6):
        case 0:
            del parent[key]
        case 1 if isinstance(value, int | float) and not isinstance(value, bool):
            parent[key] = rng.choice((value + 1, value - 1, value * 2, -value, float(value)))
        case 1 if isinstance(value, str):
            parent[key] = rng.choice((value * 2, value[1:], value + "\ud800", value.upper()))
        case 1 | 2:  # a value from elsewhere, of whatever kind
            parent[key] = copy.deepcopy(_at(root, _pick(rng, root)))
        case 3 if isinstance(parent, dict):
            parent[rng.choice(("", "0", "9" * 9, "a", "\N{SUPERSCRIPT TWO}"))] = value
        case 3:
            parent.insert(key, copy.deepcopy(value))
        case _:
            parent[key] = copy.deepcopy(rng.choice(VALUES))
    return root


def _pick(rng: random.Random, root: Node) -> Path:
    """The path of a node: each level is as likely, however many nodes are in it."""
    path: Path = ()
    while isinstance(root, dict | list) and root and rng.random() < GO_ON:
        key = rng.choice(list(root)) if isinstance(root, dict) else rng.randrange(len(root))
        path, root = (*path, key), root[key]
    return path


def _at(node: Node, path: Path) -> Node:
    for key in path:
        node = node[key]
    return node
