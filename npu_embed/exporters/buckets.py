"""Length buckets: for how many rows there is an attention stream of its own.

Attention computes all rows of its bucket, so a bucket that is too long is work in vain; a bucket
more is a small file more, loaded when a text asks for it. Steps grow with the rows, so that from 65
to 512 rows at most a fifth of a bucket is in vain.
"""

from __future__ import annotations

from collections.abc import Sequence

# (up to so many rows, in steps of so many); None = without end.
Steps = Sequence[tuple[int | None, int]]

TEXT_STEPS: Steps = ((128, 16), (256, 32), (512, 64), (None, 256))
# Images fill their budget of patches nearly, so that finer buckets would hardly be used.
IMAGE_STEPS: Steps = ((None, 128),)


def buckets_for(longest: int, steps: Steps) -> tuple[int, ...]:
    """The rows of each bucket, ascending, up to the first that holds `longest` rows."""
    buckets: list[int] = []
    rows = 0
    for end, step in steps:
        while rows < longest and (end is None or rows < end):
            rows += step
            buckets.append(rows)
    return tuple(buckets)
