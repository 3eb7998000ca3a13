"""A bundle checked where it runs: files, words to patch, token ids, every stage's numbers.

The numbers are compared with float32 rows stored in the bundle when it was exported; nearness.py
says how near they must be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from . import models, published, wordcheck
from .bf16 import F32
from .bundle import Bundle
from .device import Session
from .errors import BundleError, NpuEmbedError
from .imagecheck import check_images, read_image_references, read_texts
from .manifest import Manifest, verify_sha256
from .models import Forward
from .nearness import MIN_COSINE, Figures, Nearness
from .outcomes import Outcome, Status
from .packing import Pack, make_packs
from .specs import GemmSpec, MhaSpec
from .tokenizer import Tokenizer
from .trace import Timing


@dataclass(frozen=True, slots=True)
class Reference:
    """A text's stored forward: ids [tokens], hidden [stages, tokens, hidden_size], embedding [dim].

    prompt is the text before the text. A bundle of another maker may have no hidden rows.
    """

    index: str
    prompt: str
    text: str
    ids: NDArray[np.int32]
    hidden: F32 | None
    embedding: F32


def self_check(path: str | Path, device: str | None = None) -> Iterator[Outcome]:
    """The outcome of every check, as soon as it is known; a failed one does not end the rest.

    device: as for Embedder.

    Raises:
        BundleError: there is no readable manifest at `path`.
        SettingError: no such device name.
    """
    path = Path(path)
    yield from _check_hashes(path, Manifest.read(path))
    try:
        bundle = Bundle.open(path)
    except BundleError as error:
        yield Outcome("bundle", "FAIL", f"{error} Nothing further could be checked.")
        return
    yield Outcome("bundle", "PASS", f"{bundle.name}: {bundle.family} for {bundle.target}")
    try:
        yield from _check_streams(bundle)
        yield from _check_words(bundle)
        try:
            references = read_references(bundle)
        except BundleError as error:
            yield Outcome("references", "FAIL", str(error))
            return
        if not references:
            yield Outcome("references", "SKIP", "the manifest has no tref records")
            if not bundle.manifest.tagged("ref"):
                return
        else:
            yield _check_tokens(bundle, references)
        yield from _check_stages(bundle, references, device)
    finally:
        bundle.close()


def hash_check(path: str | Path) -> Iterator[Outcome]:
    """Whether every file is hashed and has its hash; nothing is run, nor mapped before that.

    Raises:
        BundleError: there is no readable manifest at `path`.
    """
    path = Path(path)
    failed = False
    for outcome in _check_hashes(path, Manifest.read(path)):
        failed |= outcome.status == "FAIL"
        if outcome.status != "SKIP":  # no records at all: what follows says which file lacks one
            yield outcome
    if failed:
        return
    try:
        Bundle.open(path, check_hashes=True, overrides=False).close()
    except BundleError as error:
        yield Outcome("bundle", "FAIL", str(error))
    else:
        yield Outcome("bundle", "PASS", "every file it names is hashed")


def read_references(bundle: Bundle) -> tuple[Reference, ...]:
    """The references of a bundle, each fit to be run.

    Raises:
        BundleError: a record or a tensor is missing, or does not fit the model.
    """
    vocab_size = bundle.manifest.param_int("vocab_size", minimum=1, maximum=1 << 24)
    references = []
    for record in bundle.manifest.tagged("tref"):
        index = record.field(0, "INDEX PROMPT HEX")
        name = record.field(1, "INDEX PROMPT HEX")
        if name != "-" and name not in bundle.prompts:
            raise record.error(f"tref {index} has prompt {name}, wanted one of the bundle's")
        prefix = f"tref.{index}"
        ids = bundle.tensors.i32(f"{prefix}.ids", (None,))
        if not 1 <= len(ids) <= bundle.max_tokens or ids.min() < 0 or ids.max() >= vocab_size:
            raise BundleError(
                f"{bundle.tensors.file}: tensor {prefix}.ids has {len(ids)} ids, wanted 1 to "
                f"{bundle.max_tokens} from 0 to {vocab_size - 1}; re-export the bundle."
            )
        hidden = None
        if bundle.tensors.has(f"{prefix}.hidden"):
            hidden = bundle.tensors.f32(f"{prefix}.hidden", (None, len(ids), None))
        references.append(
            Reference(
                index=index,
                prompt="" if name == "-" else bundle.prompts[name],
                text=record.field_hex(2, "a text"),
                ids=ids,
                hidden=hidden,
                embedding=bundle.tensors.f32(f"{prefix}.embedding", (None,)),
            )
        )
    return tuple(references)


def _check_hashes(path: Path, manifest: Manifest) -> Iterator[Outcome]:
    if not manifest.hashes:
        yield Outcome("sha256", "SKIP", "the manifest has no sha256 records")
        return
    failed = 0
    for file in verify_sha256(path, manifest):
        if not file.ok:
            failed += 1
            detail = f"{file.file}: found {file.found}, wanted {file.wanted}"
            yield Outcome("sha256", "FAIL", detail, {"file": file.file, "found": file.found})
    if not failed:
        count = len(manifest.hashes)
        yield Outcome("sha256", "PASS", f"{count} files", {"files": count})


def _check_streams(bundle: Bundle) -> Iterator[Outcome]:
    streams: list[tuple[GemmSpec | MhaSpec, str]] = [
        (gemm, stream.insts) for gemm in bundle.specs.all_gemms for stream in gemm.streams
    ]
    streams += [(mha, mha.insts) for mha in bundle.specs.all_mhas]
    failed = 0
    for spec, file in streams:
        try:
            if isinstance(spec, GemmSpec):
                bundle.stream(spec, file)
            else:
                bundle.decoded_stream(spec, file)  # its words are a check of their own
        except BundleError as error:
            failed += 1
            yield Outcome("streams", "FAIL", str(error), {"file": file})
    if not failed:
        detail = f"{len(streams)} decode, each with the buffers of its kernel"
        yield Outcome("streams", "PASS", detail, {"streams": len(streams)})


def _check_words(bundle: Bundle) -> Iterator[Outcome]:
    for mha in bundle.specs.all_mhas:
        try:
            _, stream = bundle.decoded_stream(mha, mha.insts)
            problem = wordcheck.find_problem(mha, stream, bundle.no_window)
        except BundleError:
            problem = f"{mha.insts} does not decode"
        count = len(mha.kv_words)
        detail = f"a kv and a window word for each of {count} cores"
        figures: Figures = {"rows": mha.rows, "cores": count}
        status: Status = "FAIL" if problem else "PASS"
        yield Outcome(f"{mha.kernel_id} words", status, problem or detail, figures)


def _check_tokens(bundle: Bundle, references: Sequence[Reference]) -> Outcome:
    try:
        tokenizer = bundle.open_tokenizer()
        odd = [r.index for r in references if not _same_ids(tokenizer, r)]
    except BundleError as error:
        return Outcome("token ids", "FAIL", str(error))
    count = len(references)
    figures: Figures = {"texts": count, "equal": count - len(odd)}
    if odd:
        detail = f"{count - len(odd)} of {count} texts equal, others: {', '.join(odd)}"
        return Outcome("token ids", "FAIL", detail, figures)
    return Outcome("token ids", "PASS", f"{count} of {count} texts equal", figures)


def _same_ids(tokenizer: Tokenizer, reference: Reference) -> bool:
    (encoded,) = tokenizer.encode_batch([reference.text], prompt=reference.prompt)
    return np.array_equal(encoded.ids, reference.ids)


def _check_stages(
    bundle: Bundle, references: Sequence[Reference], device: str | None
) -> Iterator[Outcome]:
    """Every text by itself, then all in one call, so that both ways of running are seen."""
    stages: dict[str, Nearness] = {}
    lowest = published.MIN_COSINE if bundle.published else MIN_COSINE
    embedding = Nearness.of_embeddings([r.embedding for r in references], lowest)
    try:
        session = Session.open(device, array_programs=bundle.has_array_programs)
        model = models.load(session, bundle, bundle.max_rows)
        yield Outcome("device", "PASS", f"{session.kind}: {session.device_name}")
        try:
            for texts in (*([r] for r in references), references) if references else ():
                for pack in make_packs([len(r.ids) for r in texts], model.max_rows):
                    _compare(model, pack, [texts[i] for i in pack.indices], stages, embedding)
            encoder = models.image_encoder(model)
            if encoder is not None and bundle.manifest.tagged("ref"):
                found = read_image_references(bundle)
                yield from check_images(encoder, found, lowest, read_texts(bundle))
        finally:
            model.close()
    except NpuEmbedError as error:
        yield Outcome("run", "FAIL", str(error))
    for name, nearness in (*stages.items(), ("embedding", embedding)):
        if nearness.texts:
            status: Status = "PASS" if nearness.good else "FAIL"
            yield Outcome(name, status, nearness.detail, nearness.figures)
        else:
            yield Outcome(name, "SKIP", "nothing to compare: no rows in the bundle, or no run")


def _compare(
    model: Forward,
    pack: Pack,
    texts: Sequence[Reference],
    stages: dict[str, Nearness],
    embedding: Nearness,
) -> None:
    """Run a pack and add what comes out of each stage to `stages`, by name, and to `embedding`.

    Raises:
        BundleError: the references have other stages or widths than the model.
    """
    ran: list[str] = []

    def tap(name: str, rows: F32) -> None:
        index = len(ran)
        ran.append(name)
        stage = stages.setdefault(name, Nearness.of_stage(index))
        for text, start in zip(texts, pack.starts, strict=True):
            if text.hidden is None:
                continue
            if index >= len(text.hidden) or text.hidden.shape[2] != rows.shape[1]:
                raise _misfit(text, f"a stage {index} ({name}) of {rows.shape[1]} columns")
            stage.add(rows[start : start + len(text.ids)], text.hidden[index], text.index)

    vectors = models.forward(model, [text.ids for text in texts], pack, Timing(), tap)
    for text, vector in zip(texts, vectors, strict=True):
        if text.hidden is not None and len(text.hidden) != len(ran):
            raise _misfit(text, f"{len(ran)} stages")
        if text.embedding.shape != vector.shape:
            raise _misfit(text, f"an embedding of {len(vector)} numbers")
        embedding.add(vector[None], text.embedding[None], text.index)


def _misfit(reference: Reference, wanted: str) -> BundleError:
    hidden = "none" if reference.hidden is None else list(reference.hidden.shape)
    return BundleError(
        f"tref {reference.index}: hidden {hidden}, embedding [{len(reference.embedding)}], wanted "
        f"{wanted} as the model has; re-export the bundle."
    )
