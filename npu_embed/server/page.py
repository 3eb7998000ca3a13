"""The page at `/`: one file, with everything it needs in it."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

HTML = resources.files(__package__).joinpath("page.html").read_bytes()


def _hash(tag: str) -> str:
    """The source expression of the one element of this name in the page."""
    (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), HTML, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(content).digest()).decode("ascii")
    return f"'sha256-{digest}'"


# Nothing but what is in the file runs, and it talks to nobody but this server.
HEADERS = {
    "content-security-policy": (
        f"default-src 'none'; script-src {_hash('script')}; style-src {_hash('style')}; "
        "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
