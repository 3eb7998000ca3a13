"""Metrics: what the server did, as Prometheus reads it."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from ..driver import Counters
from ..stats import Stats

CONTENT_TYPE = CONTENT_TYPE_LATEST

# Seconds, from what a pack takes on an NPU to what one of a large model takes emulated.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
PREFIX = "npu_embed_"


class Metrics:
    """Counters, gauges and histograms of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests answered.", "endpoint", "status")
        self.errors = self._counter("errors", "Requests that got no vectors.", "cause")
        self.texts = self._counter("texts", "Texts embedded.")
        self.tokens = self._counter("tokens", "Tokens computed, special tokens included.")
        self.truncated = self._counter("truncated_texts", "Texts cut to the model's limit.")
        self.dropped = self._counter("dropped_texts", "Texts not run: their clients had gone.")
        self.packs = self._counter("packs", "Packs run: forwards of texts that share it.")
        self.runs = self._counter("runs", "Kernel runs.")
        self.switches = self._counter("switches", "Runs in another context than the one before.")
        self.swaps = self._counter("swaps", "Contexts dropped to make room for another.")
        self.retries = self._counter("device_retries", "Orders that the device took at the second.")
        self.restarts = self._counter("worker_restarts", "Worker processes started anew.")
        self.queue_wait = self._seconds("queue_wait", "From tokens ready to the first run.")
        self.tokenize = self._seconds("tokenize", "From a body to its token ids.")
        self.device = self._seconds("device", "An order of packs at the worker process.")
        self.request = self._seconds("request", "A request, from its head to its answer.")
        self.pack_fill = Histogram(
            f"{PREFIX}pack_fill_ratio",
            "Tokens of an order's packs by what they could hold.",
            buckets=SHARES,
            registry=self.registry,
        )
        self.queue_texts = self._gauge("queue_texts", "Texts that wait.")
        self.queue_tokens = self._gauge("queue_tokens", "Tokens that wait.")
        self.contexts = self._gauge("contexts_held", "Hardware contexts (slots) held.")
        self.up = self._gauge("device_up", "1 while the device works, else 0.")

    def ran(self, stats: Stats, pack_rows: int) -> None:
        """Count what an order took."""
        counters: Counters = stats.counters
        self.texts.inc(stats.texts)
        self.tokens.inc(stats.tokens)
        self.packs.inc(stats.packs)
        self.runs.inc(counters.runs)
        self.switches.inc(counters.switches)
        self.swaps.inc(counters.swaps)
        if stats.packs:
            self.pack_fill.observe(stats.tokens / (stats.packs * pack_rows))

    def text(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, help_text, labels, registry=self.registry)

    def _gauge(self, name: str, help_text: str) -> Gauge:
        return Gauge(PREFIX + name, help_text, registry=self.registry)

    def _seconds(self, name: str, help_text: str) -> Histogram:
        name = f"{PREFIX}{name}_seconds"
        return Histogram(name, help_text, buckets=SECONDS, registry=self.registry)
