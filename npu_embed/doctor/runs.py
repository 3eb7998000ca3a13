"""What runs: a GEMM and an attention with known answers, then a bundle against its references."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from ..bundle import Bundle
from ..device import Session
from ..errors import NpuEmbedError
from ..outcomes import Outcome
from ..selfcheck import self_check
from .answers import Answer, NoAnswer, gemm_answer, mha_answer
from .findings import Fact, Finding, passed
from .known_kernels import write_known_kernels


def run_emulated() -> Iterator[Finding]:
    """The emulated NPU, with kernels of the doctor's own."""
    try:
        session = Session.open("emulated")
    except NpuEmbedError as error:
        yield _failed("device", error)
        return
    yield passed("device", f"{session.device_name}, emulated", kind=session.kind)
    with tempfile.TemporaryDirectory(prefix="npu-embed-doctor-") as folder:
        target = session.generation or "npu2"
        yield from _known(session, write_known_kernels(Path(folder) / "bundle", target))


def run_npu(path: Path) -> Iterator[Finding]:
    """The NPU, with the kernels of a bundle compiled for it."""
    try:
        session = Session.open("npu")
    except NpuEmbedError as error:
        yield _failed("device", error)
        return
    if session.generation is None:
        yield Finding(
            "device",
            "WARN",
            "unknown-name",
            f"{session.device_name} is of no generation this version knows by name",
            "npu1 or npu2",
            "the bundle's target cannot be compared with it",
            {"kind": session.kind, "name": session.device_name},
        )
    else:
        yield passed(
            "device",
            f"{session.device_name}: {session.generation}",
            kind=session.kind,
            name=session.device_name,
            generation=session.generation,
        )
    yield from _known(session, path)


def _known(session: Session, path: Path) -> Iterator[Finding]:
    try:
        bundle = Bundle.open(path)
    except NpuEmbedError:  # which the bundle's own check tells of
        return
    try:
        yield _compared("gemm", gemm_answer, session, bundle)
        yield _compared("mha", mha_answer, session, bundle)
    finally:
        bundle.close()


def _compared(
    check: str, run: Callable[[Session, Bundle], Answer], session: Session, bundle: Bundle
) -> Finding:
    try:
        answer = run(session, bundle)
    except NoAnswer as reason:
        return Finding(
            check,
            "WARN",
            "not-known",
            f"not run: {reason}",
            "a known answer",
            "`embedding` compares this bundle's kernels",
        )
    except Exception as error:  # a bug, ours or numpy's, is a finding too, and not the last one
        return _failed(check, error)
    facts: dict[str, Fact] = {
        "kernel": answer.kernel,
        "numbers": answer.numbers,
        "wrong": answer.wrong,
    }
    where = f"{answer.kernel} on {session.device_name}"
    if answer.wrong:
        return Finding(
            check,
            "FAIL",
            "wrong",
            f"{where}: {answer.wrong} of {answer.numbers} numbers wrong, the worst by "
            f"{answer.error:.3g}",
            f"at most {answer.allowed:.3g}",
            "trust no vector of it; install driver, firmware and XRT anew, or use "
            "NPU_EMBED_DEVICE=emulated"
            if session.kind == "npu"
            else "trust no vector of it; install npu-embed and numpy anew",
            {**facts, "error": answer.error, "allowed": answer.allowed},
        )
    return passed(check, f"{where}: {answer.numbers} numbers as computed in float64", **facts)


def _failed(check: str, error: Exception) -> Finding:
    """A run that raised; what the package raises on purpose says what to do."""
    kind = type(error).__name__
    if isinstance(error, NpuEmbedError):
        return Finding(check, "FAIL", "failed", str(error).rstrip("."), facts={"error": kind})
    return Finding(
        check,
        "FAIL",
        "bug",
        f"{kind}: {error}",
        "no such error",
        "report it with this output",
        {"error": kind},
    )


def check_bundle(path: Path, device: str) -> Iterator[Finding]:
    """A bundle's files, kernels, token ids and numbers, as `npu-embed check` compares them.

    What passed before anything runs is one finding, what did not is one each.
    """
    files: list[Outcome] = []
    numbers: list[Outcome] = []
    try:
        for outcome in self_check(path, device):
            group = numbers if any(o.check == "device" for o in files) else files
            group.append(outcome)
            if outcome.status == "FAIL":
                yield _outcome(path, outcome)
    except Exception as error:
        yield _failed("bundle", error)
        return
    for check, group in (("bundle", files), ("embedding", numbers)):
        done = [o for o in group if o.status == "PASS" and o.check != "device"]
        if done and not any(o.status == "FAIL" for o in group):
            last = next((o for o in reversed(done) if o.check == check), done[-1])
            yield passed(
                check, f"{last.detail} ({len(done)} checks)", **last.figures, checks=len(done)
            )
        yield from (_outcome(path, o) for o in group if o.status == "SKIP")


def _outcome(path: Path, outcome: Outcome) -> Finding:
    """A failed or skipped check of the bundle."""
    if outcome.status == "SKIP":
        return Finding(
            outcome.check,
            "WARN",
            "not-told",
            outcome.detail,
            "something to compare with",
            "a bundle that `npu-embed export` makes has it",
        )
    return Finding(
        outcome.check,
        "FAIL",
        "damaged",
        outcome.detail.rstrip("."),
        "",
        f"`npu-embed check {path}` has every number; export or download the bundle anew",
        outcome.figures,
    )
