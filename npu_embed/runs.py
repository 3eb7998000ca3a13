"""What the engine asks the NPU to run: GEMMs and attentions over row buffers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from .buffers import Buffer, View
from .rows import Rows
from .specs import GemmSpec, MhaSpec, Specs

Words = tuple[int, int]  # valid keys, window


@dataclass(frozen=True, slots=True)
class GemmRun:
    """c[:rows] = epilogue(a[:rows, col:col+K] B + bias), by the shortest stream that fits.

    a, c: row buffers; w: the packed B. Rows of c past `rows`, up to the stream's, are overwritten
    with what follows from whatever a holds there.
    """

    key: str
    a: Rows
    w: Buffer
    c: Rows
    rows: int
    col: int = 0

    def step(self, specs: Specs, no_window: int) -> Step:
        """The stream to run and its views.

        Raises:
            ValueError: more rows than the longest stream, or views that leave the buffers.
        """
        spec = specs.gemms[self.key]
        stream = spec.stream_for(self.rows)
        views = (
            self.a.view(0, self.col, stream.a_elems),
            self.w.view(0, self.w.size),
            self.c.view(0, 0, stream.c_elems),
        )
        return Step(spec, stream.kernel_id, stream.insts, views, None)

    def results(self) -> tuple[Rows, int, int]:
        """(buffer, first row, rows) of what it computes."""
        return self.c, 0, self.rows


@dataclass(frozen=True, slots=True)
class MhaRun:
    """o[row:] = attention among `rows` rows of qkv from `row` on, in the shortest bucket.

    name: whose buckets, where the bundle has several head geometries. window: keys further
    than this from the query take no part; None = all do. The bucket's rows past `rows` are
    overwritten with no meaning: run the texts of a pack in ascending order, and keep as many
    rows free behind the last one.
    """

    qkv: Rows
    o: Rows
    rows: int
    window: int | None = None
    row: int = 0
    name: str | None = None

    def step(self, specs: Specs, no_window: int) -> Step:
        """The stream to run, its views, and the words to patch into it.

        Raises:
            ValueError: no bucket holds `rows`, or the bucket leaves a buffer.
        """
        spec = specs.mha_for(self.rows, self.name)
        if spec is None or self.rows < 1:
            buckets = specs.mhas if self.name is None else specs.buckets.get(self.name, ())
            longest = buckets[-1].rows if buckets else 0
            raise ValueError(f"{self.name or 'mha'}: {self.rows} rows, wanted 1 to {longest}.")
        views = (
            self.qkv.view(self.row, 0, spec.q_elems),
            self.qkv.view(self.row, 0, spec.k_elems),
            self.qkv.view(self.row, 0, spec.v_elems),
            self.o.view(self.row, 0, spec.o_elems),
        )
        words = (self.rows, no_window if self.window is None else self.window)
        return Step(spec, spec.kernel_id, spec.insts, views, words)

    def results(self) -> tuple[Rows, int, int]:
        """(buffer, first row, rows) of what it computes."""
        return self.o, self.row, self.rows


Run: TypeAlias = GemmRun | MhaRun


@dataclass(frozen=True, slots=True)
class Step:
    """A run made out: the stream (its kernel's name and file), views, words to patch."""

    spec: GemmSpec | MhaSpec
    name: str
    file: str
    views: tuple[View, ...]
    words: Words | None

    def patch(self) -> dict[int, int]:
        """Word index -> value of the words to patch; for attention only."""
        assert isinstance(self.spec, MhaSpec)
        assert self.words is not None
        return {
            **dict.fromkeys(self.spec.kv_words, self.words[0]),
            **dict.fromkeys(self.spec.win_words, self.words[1]),
        }
