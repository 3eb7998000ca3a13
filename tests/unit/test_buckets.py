"""Which rows have an attention stream of their own."""

from __future__ import annotations

import pytest

from npu_embed.exporters.buckets import IMAGE_STEPS, TEXT_STEPS, buckets_for

TO_128 = [16, 32, 48, 64, 80, 96, 112, 128]


@pytest.mark.parametrize(
    ("longest", "wanted"),
    [
        (1, [16]),
        (16, [16]),
        (17, [16, 32]),
        (100, TO_128[:7]),
        (128, TO_128),
        (129, [*TO_128, 160]),
        (256, [*TO_128, 160, 192, 224, 256]),
        (257, [*TO_128, 160, 192, 224, 256, 320]),
        (512, [*TO_128, 160, 192, 224, 256, 320, 384, 448, 512]),
        (513, [*TO_128, 160, 192, 224, 256, 320, 384, 448, 512, 768]),
        (2048, [*TO_128, 160, 192, 224, 256, 320, 384, 448, 512, *range(768, 2049, 256)]),
    ],
)
def test_text_buckets_end_with_the_first_that_holds_the_longest(
    longest: int, wanted: list[int]
) -> None:
    assert list(buckets_for(longest, TEXT_STEPS)) == wanted


def test_image_buckets_are_even() -> None:
    assert buckets_for(630, IMAGE_STEPS) == (128, 256, 384, 512, 640)
    assert buckets_for(20_000, IMAGE_STEPS)[-1] == 20_096


def test_of_a_text_of_65_to_512_rows_at_most_a_fifth_of_its_bucket_is_in_vain() -> None:
    buckets = buckets_for(2048, TEXT_STEPS)
    for rows in range(65, 2049):
        bucket = next(b for b in buckets if b >= rows)
        assert (bucket - rows) / bucket < (0.2 if rows <= 512 else 1 / 3)
