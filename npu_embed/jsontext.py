"""How many values a stranger's JSON holds, told before it is read.

A value of two bytes takes 70 once it is read, so that the size of a file does not bound its memory.
"""

from __future__ import annotations

from .errors import BundleError

# A list or an object takes the most memory, and is counted twice. Published tokenizers have two
# million at most.
MAX_VALUES = 4_000_000
_BEFORE_A_VALUE = b",", b"[", b"{"


def check_values(where: str, text: bytes, action: str) -> None:
    """Refuse a JSON text of more values than any file here has; where and action are the error's.

    Counted are the characters that stand before each of them; those in strings count too.

    Raises:
        BundleError: there are too many.
    """
    count = 1 + sum(map(text.count, _BEFORE_A_VALUE))
    if count > MAX_VALUES:
        raise BundleError(f"{where}: {count} JSON values, wanted at most {MAX_VALUES}; {action}.")
