"""How many values a JSON text holds, told before it is read."""

from __future__ import annotations

import pytest

from npu_embed import jsontext
from npu_embed.errors import BundleError

MOST = 10


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsontext, "MAX_VALUES", MOST)


@pytest.mark.parametrize(
    "text",
    [b"[" + b",".join([b"1"] * MOST) + b"]", b"[" * MOST, b"[{}" + b",{}" * 4 + b"]", b"{" * MOST],
)
def test_one_value_more_than_there_may_be_is_refused(text: bytes) -> None:
    wanted = f"^f.json: 11 JSON values, wanted at most {MOST}; get another\\.$"
    with pytest.raises(BundleError, match=wanted):
        jsontext.check_values("f.json", text, "get another")
    jsontext.check_values("f.json", text[1:], "get another")


def test_what_stands_in_a_text_counts_too() -> None:
    """No more is promised than that there are not more: strings are not told apart."""
    with pytest.raises(BundleError, match="12 JSON values"):
        jsontext.check_values("f.json", b'"' + b"," * 11 + b'"', "get another")
