"""Refusal: an answer other than vectors; its cause, status and words, whatever the form of it."""

from __future__ import annotations

from ..errors import DeviceError, InputError, NpuEmbedError
from .link import WorkerDied, WorkerStuck

RETRY_S = 1  # after what passes by itself


class Refusal(Exception):
    """A request is answered with an error.

    cause is its name in metrics and, where OpenAI has one, in `code`; param the field of the
    request at fault; retry_after_s tells when to come again.
    """

    def __init__(
        self,
        status: int,
        cause: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.cause = cause
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


def invalid(message: str, param: str | None = None, cause: str = "invalid_request") -> Refusal:
    """The request cannot be understood or done."""
    return Refusal(400, cause, message, param=param)


def too_large(message: str, param: str | None = None) -> Refusal:
    """The request is larger than the server takes; the message names the limit."""
    return Refusal(413, "too_large", message, param=param)


def draining() -> Refusal:
    """The server is about to end."""
    return Refusal(
        503, "draining", "the server is shutting down; ask another one.", retry_after_s=RETRY_S
    )


def of_engine(error: NpuEmbedError) -> Refusal:
    """What an error of the engine is to a client."""
    if isinstance(error, InputError):
        return invalid(str(error))
    if isinstance(error, WorkerStuck):
        return Refusal(503, "worker_stuck", str(error), retry_after_s=RETRY_S)
    if isinstance(error, WorkerDied):
        return Refusal(503, "worker_died", str(error), retry_after_s=RETRY_S)
    if isinstance(error, DeviceError):
        return Refusal(503, "device_error", str(error), retry_after_s=RETRY_S)
    return Refusal(500, "server_error", str(error))
