"""The HTTP side: routes, keys, bodies, and every answer's form."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import time
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeAlias, TypeVar
from urllib.parse import quote

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ..errors import NpuEmbedError
from ..records import MANIFEST
from . import openai_api, page, tei_api
from .budgets import SLOW_S, Body, Reserved
from .metrics import CONTENT_TYPE
from .refusals import Refusal, of_engine, too_large
from .request import Request as Asked
from .service import ClientGone, Done, Service

log = logging.getLogger("npu_embed")

JSON = "application/json"
CLIENT_GONE = 499  # nobody sees it; in metrics and the log
PASSED_OVER_BYTES = 64 << 20  # of a body that is refused
PASS_OVER_S = 5.0
SHOWN_CHARACTERS = 80  # of a path that there is not

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]
ErrorForm: TypeAlias = Callable[[Refusal], bytes]
Form = TypeVar("Form", openai_api.Form, tei_api.Form)


def create_app(service: Service) -> Starlette:
    """The ASGI application in front of a service, which somebody else starts and closes."""
    app = Starlette(
        routes=[_route(service, *line) for line in Endpoints(service).table()],
        exception_handlers={HTTPException: partial(_http_error, service)},
    )
    app.router.redirect_slashes = False  # a redirect has no form that clients of the API know
    return app


class Endpoints:
    """What each path answers."""

    def __init__(self, service: Service) -> None:
        self._service = service
        manifest = service.bundle.path / MANIFEST
        self._created = int(os.stat(manifest).st_mtime)

    def table(self) -> list[tuple[str, str, Handler, ErrorForm, bool]]:
        """Path, method, handler, form of errors, and whether a key is asked for."""
        as_openai, as_tei = openai_api.error, tei_api.error
        return [
            ("/v1/embeddings", "POST", self.embeddings, as_openai, True),
            ("/v1/models", "GET", self.models, as_openai, True),
            ("/v1/models/{model:path}", "GET", self.model, as_openai, True),
            ("/embed", "POST", self.embed, as_tei, True),
            ("/health", "GET", self.health, as_openai, False),
            ("/metrics", "GET", self.metrics, as_openai, False),
            ("/", "GET", self.page, as_openai, False),
        ]

    async def embeddings(self, request: Request) -> Response:
        """POST /v1/embeddings."""
        service = self._service
        most, dim = service.options.max_texts, service.ready.dim
        async with service.admitted():
            return await self._embed(
                request,
                lambda body: openai_api.read(body, service.models, dim, most),
                lambda form, done: openai_api.answer(form, done.vectors, done.tokens),
            )

    async def embed(self, request: Request) -> Response:
        """POST /embed, as Text Embeddings Inference has it."""
        service = self._service
        most, dim = service.options.max_texts, service.ready.dim
        async with service.admitted():
            return await self._embed(
                request,
                lambda body: tei_api.read(body, dim, most, normalizes=service.normalizes),
                lambda form, done: tei_api.answer(form, done.vectors),
            )

    async def _embed(
        self,
        request: Request,
        read: Callable[[bytes], tuple[Asked, Form]],
        answer: Callable[[Form, Done], bytes],
    ) -> Response:
        """The answer to what a body asks for."""
        service = self._service
        with service.bodies.one() as body:
            content = await self._content(request, body)
            asked, form = await service.in_thread(partial(read, content))
            room = service.answers.reserve(len(asked), form.dim or service.ready.dim)
            try:
                job = await service.prepare_job(asked)
            except BaseException:
                room.release()
                raise
        del content, asked  # the texts: only their ids wait in line
        try:
            done = await service.run(job, until_gone(request))
            return Answer(answer(form, done), room)
        except BaseException:
            room.release()
            raise

    async def _content(self, request: Request, body: Body) -> bytes:
        """The body of a request, within the options' size and time, as long as there is room."""
        options = self._service.options
        hold = partial(self._service.bodies.add, body)
        reading = asyncio.ensure_future(read_body(request, options.max_body_bytes, hold))
        either: list[asyncio.Future[Any]] = [reading, body.given_up]
        try:
            await asyncio.wait(either, timeout=options.body_s, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                body.whole = True
                return reading.result()
        finally:
            reading.cancel()
        message = f"body: not whole after {options.body_s:g} s, the most this server waits."
        if body.given_up.done():
            message = f"body: not whole after {SLOW_S:g} s, while others had no room."
        raise Refusal(408, "body_timeout", message)

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        listed = [openai_api.model(name, self._created) for name in self._service.models]
        return json_response({"object": "list", "data": listed})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME."""
        name = request.path_params["model"]
        if name not in self._service.models:
            raise openai_api.unknown_model(self._service.models)
        return json_response(openai_api.model(name, self._created))

    async def health(self, request: Request) -> Response:
        """GET /health: 200 while texts can be embedded, else 503."""
        well, how = self._service.health()
        return json_response(how, 200 if well else 503)

    async def metrics(self, request: Request) -> Response:
        """GET /metrics."""
        text = self._service.metrics_text()
        return Response(text, headers={"content-type": CONTENT_TYPE})

    async def page(self, request: Request) -> Response:
        """GET /: the page."""
        return Response(page.HTML, media_type="text/html", headers=page.HEADERS)


class Answer(Response):
    """An answer of vectors, with the room it takes until its client's connection has it."""

    def __init__(self, content: bytes, room: Reserved) -> None:
        super().__init__(content, media_type=JSON)
        self._room = room
        room.resize(len(content))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Give the answer to the connection; what that has yet to send is counted there."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._room.release()


def _route(
    service: Service, path: str, method: str, handler: Handler, form: ErrorForm, keyed: bool
) -> Route:
    """A route whose every answer, whatever happens, is counted and in form."""

    async def endpoint(request: Request) -> Response:
        start = time.perf_counter()
        number = uuid.uuid4().hex
        cause = ""
        try:
            if keyed:
                check_key(request, service.options.api_key)
            response = await handler(request)
        except (ClientGone, ClientDisconnect):
            cause = "client_gone"
            response = Response(status_code=CLIENT_GONE)
        except Exception as error:
            refusal = _refusal(error, number)
            cause, response = refusal.cause, _refuse(refusal, form)
            if refusal.status != 408:
                await pass_over(request)
        seconds = time.perf_counter() - start
        if cause:
            service.metrics.errors.labels(cause).inc()
        service.metrics.requests.labels(path, str(response.status_code)).inc()
        if keyed:
            service.metrics.request.observe(seconds)
        _log(service, number, f"{method} {path}", response.status_code, cause, seconds)
        response.headers["x-request-id"] = number
        return response

    return Route(path, endpoint, methods=[method])


def _log(service: Service, number: str, what: str, status: int, cause: str, seconds: float) -> None:
    """A request's line in the log, where one is wanted."""
    if service.options.log_requests:
        log.info("%s %s %d %s %.3f s", number, what, status, cause or "ok", seconds)


def _refusal(error: Exception, number: str) -> Refusal:
    """What a client is told of an error."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, NpuEmbedError):
        return of_engine(error)
    # Its words may quote a text: the log gets its type and place only.
    log.error("request %s: %s", number, _place(error))
    return Refusal(500, "server_error", f"a bug of the server; its log has request {number}.")


def _place(error: BaseException) -> str:
    """An exception's type, and the file and line it came from."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None:
        frames = frames.tb_next
    if frames is None:
        return type(error).__name__
    return f"{type(error).__name__} at {frames.tb_frame.f_code.co_filename}:{frames.tb_lineno}"


def _refuse(refusal: Refusal, form: ErrorForm) -> Response:
    headers = {}
    if refusal.retry_after_s is not None:
        headers["retry-after"] = str(refusal.retry_after_s)
    if refusal.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(form(refusal), refusal.status, headers, JSON)


async def _http_error(service: Service, request: Request, error: Exception) -> Response:
    """No such path, or not with this method."""
    start = time.perf_counter()
    number = uuid.uuid4().hex
    await pass_over(request)
    status = error.status_code if isinstance(error, HTTPException) else 500
    what = "no such path" if status == 404 else "not with this method"
    message = f"{what}; this server has POST /v1/embeddings, POST /embed, GET /v1/models."
    headers = {**(getattr(error, "headers", None) or {}), "x-request-id": number}
    form = tei_api.error if request.url.path == "/embed" else openai_api.error
    cause = "not_found" if status == 404 else "method_not_allowed"
    service.metrics.errors.labels(cause).inc()
    service.metrics.requests.labels("other", str(status)).inc()
    # Both are a client's words: a wrong base URL is to be seen, a long path or a line's end not.
    what = f"{request.method} {quote(request.scope['path'])}"[:SHOWN_CHARACTERS]
    _log(service, number, what, status, cause, time.perf_counter() - start)
    return Response(form(Refusal(status, cause, message)), status, headers, JSON)


def json_response(value: dict[str, Any], status: int = 200) -> Response:
    """A value as a JSON answer, never kept by a cache."""
    return Response(orjson.dumps(value), status, {"cache-control": "no-store"}, JSON)


def check_key(request: Request, key: str | None) -> None:
    """Check the key of a request, in a time that does not tell how much of it is right.

    Raises:
        Refusal: it is missing or another.
    """
    if key is None:
        return
    given = request.headers.get("authorization", "")
    scheme, _, token = given.partition(" ")
    # Headers are latin-1 to the framework, UTF-8 to whoever sent a key.
    same = hmac.compare_digest(
        token.strip().encode("latin-1"), key.encode("utf-8", "surrogateescape")
    )
    if scheme.lower() != "bearer" or not same:
        raise Refusal(401, "invalid_api_key", "Authorization: no valid key, wanted `Bearer KEY`.")


async def read_body(request: Request, most: int, hold: Callable[[int], None]) -> bytes:
    """The body of a request, of at most so many bytes; hold is told of each part.

    Raises:
        Refusal: it is larger, or is not said to be JSON.
        ClientDisconnect: the client has gone.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != JSON and not kind.endswith("+json"):
        # A page of any origin may send other types here without asking.
        raise Refusal(415, "unsupported_media_type", f"content-type: wanted {JSON}.")
    over = too_large(f"body: more than {most} bytes, the most this server takes.")
    said = request.headers.get("content-length", "")
    if said.isascii() and said.isdigit() and int(said) > most:
        raise over
    parts = bytearray()
    async for part in request.stream():
        hold(len(part))
        if len(parts) + len(part) > most:
            raise over
        parts += part
    return bytes(parts)


async def pass_over(request: Request) -> None:
    """Take and drop what is left of a body that is refused, within limits.

    A client that sends all of it before it reads, on a connection that is closed after the answer,
    would find that connection reset, and no answer.
    """
    said = request.headers.get("content-length", "")
    if "expect" in request.headers or (said.isdigit() and int(said) > PASSED_OVER_BYTES):
        return

    async def rest() -> None:
        left = PASSED_OVER_BYTES
        async for part in request.stream():
            left -= len(part)
            if left < 0:
                return

    # RuntimeError: the body has been read to its end.
    with contextlib.suppress(asyncio.TimeoutError, ClientDisconnect, RuntimeError):
        await asyncio.wait_for(rest(), PASS_OVER_S)


async def until_gone(request: Request) -> None:
    """Wait until the client hangs up; its request has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
