"""Batch jobs: files of texts -> a file of vectors, in flat memory, resumable after any end.

job says what is done, run does it. The rows are cut into shards (shards.py); each is computed alone
and stored in a folder beside the output (folder.py); when all are there they become the output.
"""

from __future__ import annotations

from .job import Job, Summary
from .run import check, run

__all__ = ["Job", "Summary", "check", "run"]
