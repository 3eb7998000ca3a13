"""A fuzzer without coverage, for where atheris is not to be had: random changes to the seeds."""

from __future__ import annotations

import faulthandler
import random
import time
from collections.abc import Callable, Sequence

from fuzz.json_changes import changed

HANG_SECONDS = 60
MAX_BYTES = 1 << 16
MOST_CHANGES = 8

NUMBERS = (0, 1, 2, 3, 4, 7, 8, 16, 63, 64, 127, 128, 255, 256, 1023, 1024, 4095, 4096, 65535)
EDGES = (*NUMBERS, *(2**n + d for n in (16, 20, 24, 31, 32, 63, 64) for d in (-1, 0, 1)))
TOKENS = (
    b"\0", b"\n", b" ", b"=", b",", b"-", b"..", b"/", b'"', b"{", b"[", b"]", b"}", b":",
    b"\xff", b"1e999", b"NaN", b"null", b"version 1\n", b"param ", b"gemm ", b"mha ", b"xclbin2\0",
)  # fmt: skip


def _flip(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    at = rng.randrange(len(data))
    data[at] ^= 1 << rng.randrange(8)


def _byte(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    data[rng.randrange(len(data))] = rng.randrange(256)


def _integer(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    """A whole word or a long one, at a multiple of its size or anywhere."""
    size = rng.choice((2, 4, 4, 4, 8))
    at = rng.randrange(len(data)) // rng.choice((1, size)) * rng.choice((1, size))
    value = rng.choice(EDGES) & (1 << 8 * size) - 1
    data[at : at + size] = value.to_bytes(size, "little")


def _digits(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    """A number written in digits, in the place of another."""
    starts = [i for i, byte in enumerate(data) if chr(byte).isdigit()]
    if starts:
        at = end = rng.choice(starts)
        while end < len(data) and chr(data[end]).isdigit():
            end += 1
        data[at:end] = str(rng.choice((-1, 1)) * rng.choice(EDGES)).encode()


def _remove(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    at = rng.randrange(len(data))
    del data[at : at + rng.choice((1, 4, 16, len(data)))]


def _repeat(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    at, size = rng.randrange(len(data)), rng.choice((1, 4, 16, 64, 256))
    to = rng.randrange(len(data))
    data[to:to] = data[at : at + size] * rng.choice((1, 2, 8))


def _token(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    at = rng.randrange(len(data))
    data[at : at + rng.choice((0, 1))] = rng.choice(TOKENS)


def _splice(rng: random.Random, data: bytearray, others: Sequence[bytes]) -> None:
    other = rng.choice(others)
    data[rng.randrange(len(data)) :] = other[rng.randrange(len(other) + 1) :]


_CHANGES = (_flip, _byte, _integer, _integer, _digits, _remove, _repeat, _token, _splice)
_SOME_JSON = 0.7  # of the inputs that are JSON


def mutated(rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    """One of the seeds with a few changes."""
    data = bytearray(rng.choice(seeds))
    if rng.random() < _SOME_JSON and (other := changed(rng, bytes(data))) is not None:
        return other[:MAX_BYTES]
    for _ in range(rng.randint(1, MOST_CHANGES)):
        if not data:
            data += b"\0"
        rng.choice(_CHANGES)(rng, data, seeds)
    return bytes(data[:MAX_BYTES])


def fuzz(
    target: Callable[[bytes], None],
    seeds: Sequence[bytes],
    seconds: float,
    seed: int,
    keep: Callable[[bytes], object],
) -> int:
    """Call target with changed seeds for so long; how many times. keep is given what it fails at.

    An input that takes HANG_SECONDS ends the process with a traceback of where it is.
    """
    rng = random.Random(seed)
    end = time.monotonic() + seconds
    count = 0
    while time.monotonic() < end:
        data = mutated(rng, seeds)
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        try:
            target(data)
        except BaseException:
            keep(data)
            raise
        count += 1
    faulthandler.cancel_dump_traceback_later()
    return count
