"""The numbers that run-time words name epilogues by; see docs/array-programs.md."""

from __future__ import annotations

NONE, GELU_ERF, GELU_TANH, GEGLU_TANH, TANH = range(5)
