"""Running a batch job: inputs -> one output, in shards that outlive the process that makes them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, BinaryIO

from ..errors import InputError, NpuEmbedError
from ..progress import bar
from ..quantization import check_dtype
from ..vectors import checked_dim
from . import calibration
from .assemble import Facts, assemble, finish
from .compute import How, Kept, compute
from .engines import Engines, at_hand
from .fingerprint import check_same, differences, identity
from .folder import WorkFolder
from .formats import SAFETENSORS, TABLES, import_pyarrow
from .job import STOP, Job, Summary
from .meter import meter
from .scan import Scan, bad_row_error, scan
from .shards import Shard, Store, Totals, cut_shards
from .sources import STDIN, Source, all_rows, expand, make_source
from .spool import spooled_sources
from .stored import beside, changed_since, is_ours, read_metadata

if TYPE_CHECKING:
    from ..embedder import Embedder

log = logging.getLogger("npu_embed")


def check(job: Job) -> list[str]:
    """The paths of a job's inputs, with what needs no bundle and no lock checked.

    Raises:
        InputError: an input is missing, or is of an unknown format.
        SettingError: pyarrow is needed and not installed.
    """
    if job.output.is_dir():
        raise InputError(f"{job.output}: a folder, wanted the name of a file.")
    paths = expand(job.inputs, job.output)
    _check_beside(job, paths)
    named = [(path, make_source(path, job.input_format, None).format_name) for path in paths]
    for name, format_name in [*named, (str(job.output), job.format_name)]:
        if format_name in TABLES:
            import_pyarrow(name)
    return paths


def _check_beside(job: Job, paths: Sequence[str]) -> None:
    """Check that the files beside the output can be, and are no inputs."""
    for place in beside(job.output, job.format_name):
        try:
            there = place.exists()
        except OSError as error:  # a name that is too long
            raise InputError(
                f"{place}: {error.strerror}, wanted a name for a file beside the output; choose a "
                "shorter one."
            ) from error
        for path in paths if there else ():
            if path != STDIN and place.samefile(path):
                raise InputError(
                    f"{path}: is replaced with the output {job.output}, wanted an input apart from "
                    "it; name the output otherwise."
                )


def run(
    embedder: Embedder,
    job: Job,
    *,
    stdin: BinaryIO | None = None,
    progress: bool = False,
    engines: Engines | None = None,
) -> Summary:
    """Do a job, or what is left of it; the output appears when it is complete.

    stdin: what `-` stands for. progress: draw a bar on a terminal. engines: what computes the
    shards in the place of embedder, of the same bundle on the same kind of device. Whatever it
    raises: the same job goes on where this run ended.

    Raises:
        InputError: an input, a row or an argument cannot be used; another process does this job;
            what is there already belongs to another job.
        OutputError: the output, or what is kept on the way to it, cannot be written.
        NoFreeContext, RunFailed, DeviceError: from the device.
    """
    paths = check(job)
    dim = checked_dim(job.dim, embedder.dim)
    embedder.bundle.prompt(job.prompt)
    with WorkFolder.locked(job.output) as work:
        if job.restart:
            work.clear()
        sources = spooled_sources(paths, job.input_format, work, stdin)
        ids = job.id_column is not None and job.format_name == SAFETENSORS
        stop = job.on_error == STOP
        found = scan(sources, job.names, job.format_name, stop=stop, id_integers=ids)
        ranges_id = calibration.identity(embedder, job.dtype, job.calibrate)
        wanted = identity(embedder, job, dim, found.sha256, ranges_id)
        if (done := _done_before(job, wanted)) is not None:
            if not differences(work.job() or wanted, wanted):
                work.clear()
            return done
        _check_may_write(job, work, wanted)
        how = How(job.prompt, job.dim, job.truncate, job.dtype)
        ranges = calibration.int8_ranges(embedder, how, job.calibrate, job.names, dim)
        check_dtype(job.dtype, dim, ranges)
        work.begin(wanted)
        kept = Kept(job.names, job.format_name, found.schema, ids)
        how = replace(how, ranges=ranges)
        running = _Run(embedder, engines, job, Store(work.path), sources, found, how)
        with running.telling():
            running.compute(kept, progress=progress)
            found.check_unchanged(sources)
            facts = Facts(job.format_name, dim, job.dtype, ranges, wanted, found.schema, ids)
            assemble(work, running.store, facts, running.totals)
            finish(work, job.output, job.format_name)
        return running.summary()


def _done_before(job: Job, wanted: dict[str, str]) -> Summary | None:
    """What an earlier run of this very job did, if it came to its end."""
    if job.restart or not job.output.exists():
        return None
    stored = read_metadata(job.output, job.format_name)
    if differences(stored, wanted) or (counts := _counts(stored)) is None:
        return None
    rows, skipped, tokens, truncated = counts
    if (job.on_error == STOP and skipped) or changed_since(job.output, stored):
        return None
    log.info("%s: complete already", job.output)
    return Summary(job.output, rows, skipped, 0, rows + skipped, tokens, truncated)


def _counts(stored: Mapping[str, str]) -> list[int] | None:
    """Rows, skipped rows, tokens and truncated texts of an output; None where it is damaged."""
    try:
        return [int(stored[key]) for key in ("rows", "skipped", "tokens", "truncated")]
    except (KeyError, ValueError):
        return None


def _check_may_write(job: Job, work: WorkFolder, wanted: dict[str, str]) -> None:
    """Check that what is there, finished or not, is not another job's."""
    begun = work.job()
    if begun is not None and (work.has_shards() or not differences(begun, wanted)):
        check_same(begun, wanted, work.path)
    elif job.output.exists() and not job.restart:  # where no shard is, nothing else is lost
        raise InputError(
            f"{job.output}: exists{_what_it_is(job, wanted)}, wanted a new file; name another, or "
            "pass --restart to replace it."
        )
    elif not job.restart:
        for place in beside(job.output, job.format_name):
            if place.exists() and not is_ours(place):
                raise InputError(
                    f"{place}: exists and is of no batch job, wanted to write it; name another "
                    "output, or pass --restart to replace it."
                )


def _what_it_is(job: Job, wanted: Mapping[str, str]) -> str:
    """How an output that is there is none of this job, in words; "" where it does not say."""
    stored = read_metadata(job.output, job.format_name)
    if not stored:
        return ""
    if what := differences(stored, wanted):
        return f", with another {what}"
    if how := changed_since(job.output, stored):
        return f", with {how}"
    counts = _counts(stored)
    return f", with {counts[1]} rows skipped (wanted none)" if counts else ", with damaged counts"


@dataclass(slots=True)
class _Run:
    """A job on its way."""

    embedder: Embedder
    engines: Engines | None
    job: Job
    store: Store
    sources: list[Source]
    found: Scan
    how: How
    totals: Totals = field(default_factory=Totals)
    computed: int = 0
    kept: int = 0

    def compute(self, kept: Kept, *, progress: bool) -> None:
        """Compute the shards that are missing, and count all."""
        work = partial(compute, how=self.how, kept=kept, stop=self.job.on_error == STOP)
        engines = self.engines or at_hand(self.embedder)
        with (
            self._bar(show=progress) as advance,
            closing(engines(work, self._missing())) as computed,
        ):
            for shard, (content, record) in computed:
                self.found.check_unchanged(self.sources)  # else it may be of another input
                self.store.save(shard.index, content, record)
                self.computed += len(shard.rows)
                self.totals.add(shard.index, record)
                advance(self.kept + self.computed)

    def _bar(self, *, show: bool) -> AbstractContextManager[Callable[[int], None]]:
        """The progress bar: with rates where the engine is at hand."""
        if self.engines is None:
            return meter("embedding", self.found.rows, self.embedder, show=show)
        return bar("embedding", self.found.rows, "rows", show=show)

    def _missing(self) -> Iterator[Shard]:
        """The shards that no earlier run has computed; those that one has are counted."""
        rows = all_rows(self.sources, self.job.names)
        for shard in cut_shards(rows, self.job.shard_rows):
            record = self.store.record(shard.index)
            if record is None or not record.is_of(shard):
                yield shard
                continue
            if record.skipped and self.job.on_error == STOP:
                first = record.skipped[0]
                raise bad_row_error(first.where, first.reason)
            self.kept += len(shard.rows)
            self.totals.add(shard.index, record)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Say what is kept, should the job end before its end."""
        try:
            yield
        except (NpuEmbedError, KeyboardInterrupt):
            log.warning(
                "%s: stopped, %d of %d rows are done and kept; the same command goes on with them",
                self.job.output,
                self.computed + self.kept,
                self.found.rows,
            )
            raise

    def summary(self) -> Summary:
        """What was done."""
        t = self.totals
        return Summary(
            self.job.output, t.rows, t.skipped, self.computed, self.kept, t.tokens, t.truncated
        )
