"""npu-embed serve: an HTTP server that OpenAI's clients speak to."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import click

from .. import settings
from ..errors import SettingError
from ..server import options as defaults
from .bundles import bundle_option, chosen_bundle

if TYPE_CHECKING:
    from ..bundle import Bundle
    from ..server.messages import Ready

MIB = 1 << 20


@click.command(
    short_help="Serve vectors over HTTP, as OpenAI does.",
    epilog="\b\nExamples:\n  npu-embed serve\n"
    "  NPU_EMBED_API_KEY=secret npu-embed serve --host 0.0.0.0 --port 9000\n"
    "  curl http://127.0.0.1:8000/v1/embeddings -H 'content-type: application/json' \\\n"
    """       -d '{"model": "all-MiniLM-L6-v2", "input": ["a text", "another"]}'""",
)
@bundle_option
@click.option("--device", type=click.Choice(settings.DEVICES), help="Where to run; default auto.")
@click.option("--host", default=defaults.HOST, show_default=True, help="The address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=defaults.PORT,
    show_default=True,
    help="Its port; 0 takes a free one, which is printed.",
)
@click.option(
    "--api-key",
    metavar="KEY",
    help="What clients must send as `Authorization: Bearer KEY`. Others on this machine can read "
    "options: NPU_EMBED_API_KEY is the better place.",
)
@click.option(
    "--alias",
    "aliases",
    metavar="NAME",
    multiple=True,
    help="A model name to answer to besides the bundle's own; may be given more than once.",
)
@click.option(
    "--truncate/--no-truncate",
    default=False,
    show_default=True,
    help="Cut texts that are too long, or refuse them as OpenAI does, where a request does not "
    'say ("truncate": true).',
)
@click.option(
    "--max-texts",
    type=click.IntRange(1),
    default=defaults.MAX_TEXTS,
    show_default=True,
    help="The most texts of a request.",
)
@click.option(
    "--max-body-mib",
    type=click.IntRange(1, 1024),
    default=defaults.MAX_BODY_BYTES // MIB,
    show_default=True,
    help="The largest body of a request, in MiB.",
)
@click.option(
    "--queue-texts",
    type=click.IntRange(1),
    default=defaults.QUEUE_TEXTS,
    show_default=True,
    help="With as many texts waiting, requests are answered with 429.",
)
@click.option(
    "--linger-ms",
    type=click.FloatRange(0, 1000),
    default=defaults.LINGER_MS,
    show_default=True,
    help="How long an idle device waits for more texts to share a forward.",
)
@click.option(
    "--drain-s",
    type=click.FloatRange(0),
    default=defaults.DRAIN_S,
    show_default=True,
    help="How long requests in hand may take after SIGTERM or Ctrl-C.",
)
@click.option(
    "--order-s",
    type=click.FloatRange(1, 86400),
    default=defaults.ORDER_S,
    show_default=True,
    help="How long the process that has the device may take for what it was given; then it is "
    "replaced, and the requests in hand get 503.",
)
@click.option("--log-requests", is_flag=True, help="A line on stderr for each request; no texts.")
def serve(
    bundle: str | None,
    device: str | None,
    host: str,
    port: int,
    api_key: str | None,
    aliases: tuple[str, ...],
    truncate: bool,
    max_texts: int,
    max_body_mib: int,
    queue_texts: int,
    linger_ms: float,
    drain_s: float,
    order_s: float,
    log_requests: bool,
) -> None:
    """Serve vectors over HTTP.

    POST /v1/embeddings is OpenAI's, POST /embed is Text Embeddings Inference's. GET /health says
    how the device is, GET /metrics is for Prometheus, and a browser finds a page at /.

    Texts of many clients share the device's forwards. One process, which is started with the
    server, has the device.
    """
    try:
        from ..server.run import run
    except ModuleNotFoundError as error:
        raise SettingError(
            f"serve: {error.name} is not installed, wanted the server's packages; "
            "pip install 'npu-embed[server]'."
        ) from error

    if api_key == "":
        raise SettingError("--api-key: empty, wanted a key; leave it out to ask for none.")
    if log_requests:
        logger = logging.getLogger("npu_embed")
        logger.setLevel(logging.INFO)
        for handler in logger.handlers:
            handler.setLevel(logging.INFO)
    options = defaults.Options(
        bundle=chosen_bundle(bundle),
        device=settings.device() if device is None else device,
        host=host,
        port=port,
        api_key=settings.api_key() if api_key is None else api_key,
        aliases=aliases,
        truncate=truncate,
        max_texts=max_texts,
        max_body_bytes=max_body_mib * MIB,
        held_body_bytes=max(defaults.HELD_BODY_BYTES, max_body_mib * MIB),
        queue_texts=queue_texts,
        linger_ms=linger_ms,
        drain_s=drain_s,
        order_s=order_s,
        log_requests=log_requests,
    )
    run(options, _say_where)


def _say_where(url: str, ready: Ready, bundle: Bundle) -> None:
    what = f"{bundle.name}, {ready.dim} numbers a vector, on the {ready.device} NPU"
    click.echo(f"serving {what} at {url} (end it with Ctrl-C)", err=True)
