"""Bundle: a model ready to run, its files checked against each other."""

from __future__ import annotations

import logging
import os
from functools import cached_property
from pathlib import Path

from . import published, settings, streamcheck, wordcheck
from .containers import holds_array_program
from .emulator import txn, xclbin
from .errors import BundleError, InputError
from .manifest import Manifest, bundle_path, check_sha256
from .published_tokenizer import read_tokenizer
from .specs import GemmSpec, MhaSpec, Specs, check_words, parse_specs
from .tensors import SAFETENSORS, TENSORS_BIN, TENSORS_TXT, Tensors, open_tensors
from .tokenizer import Tokenizer

log = logging.getLogger("npu_embed")

TARGETS = {"npu1": 3, "npu2": 4}  # by name: the device generation in a stream's header
TOKENIZER = "tokenizer.json"
MAX_STREAM_BYTES = 16 << 20
MAX_ROWS = 1 << 16  # of a pack
GEMM_BUFFERS = 3  # A, B, C
MHA_BUFFERS = 4  # Q, K, V, O


class Bundle:
    """An opened bundle folder.

    name and family are the model's, target the NPU generation its kernels are for, prompts its
    prompt texts by name, no_window the window word that lets every key take part, published whether
    it has the published layout. max_tokens is 0 where it is for images only.
    """

    def __init__(self, path: Path, manifest: Manifest, specs: Specs, tensors: Tensors) -> None:
        self.path = path
        self.manifest = manifest
        self.specs = specs
        self.tensors = tensors
        self.name = manifest.param_str("name", path.name)
        self.family = manifest.param_str("family")
        self.published = self.family == published.FAMILY
        self.target = manifest.param_str("target", "npu2")
        fewest = 0 if self.published else 1  # it may be for images only
        self.max_tokens = manifest.param_int("max_tokens", minimum=fewest, maximum=1 << 20)
        self.max_rows = manifest.param_int("max_rows", minimum=1, maximum=MAX_ROWS)
        self.no_window = manifest.param_int("no_window", 0xFFFFFFFF, minimum=0, maximum=2**32 - 1)
        if self.max_rows < self.max_tokens:
            raise BundleError(
                f"manifest.txt: param max_rows {self.max_rows}, wanted at least max_tokens "
                f"{self.max_tokens}; re-export the bundle."
            )
        self.prompts = _prompts(manifest)
        default = manifest.params.get("default_prompt")
        if default is not None and default not in self.prompts:
            raise BundleError(
                f"manifest.txt:{manifest.param_lines.get('default_prompt', 0)}: param "
                f"default_prompt {default}, wanted one of the prompt records "
                f"({', '.join(sorted(self.prompts)) or 'none'}); re-export the bundle."
            )
        self._streams: dict[tuple[int, str], bytes] = {}  # by the record's line and the file
        self._packed_bytes: dict[int, int | None] = {}
        self._told: set[Path] = set()
        self._overrides = True

    @classmethod
    def open(
        cls, path: str | Path, *, check_hashes: bool = False, overrides: bool = True
    ) -> Bundle:
        """The bundle in a folder, everything in it that can be checked without running it checked.

        check_hashes: read every file and compare it with its sha256 record, before anything else
        of it is used. overrides: whether files in NPU_EMBED_KERNELS go before the bundle's.

        Raises:
            BundleError: a file is missing, damaged, or contradicts the manifest; or has not the
                hash of its record, or no record, where that is to be checked.
        """
        path = Path(path)
        if not os.path.isdir(path):  # Path.is_dir raises where the name is too long
            raise no_such_bundle(path)
        manifest = Manifest.read(path)
        specs = parse_specs(manifest)
        if check_hashes:
            check_sha256(path, manifest, _files(path, manifest, specs))
        tensors = open_tensors(path)
        if published.is_published(manifest):
            manifest, specs, tensors = published.translate(manifest, specs, tensors)
        bundle = cls(path, manifest, specs, tensors)
        bundle._overrides = overrides
        if bundle.target not in TARGETS:
            raise BundleError(
                f"manifest.txt: param target {bundle.target}, wanted npu1 or npu2; "
                "re-export the bundle."
            )
        bundle._check_kernel_files()
        return bundle

    def _kernel_file(self, file: str, line: int) -> Path:
        """An xclbin or stream of the manifest; one of its name in NPU_EMBED_KERNELS goes before.

        Raises:
            BundleError: it is missing, or its path leaves the bundle.
        """
        own = bundle_path(self.path, file, f"manifest.txt:{line}")
        overrides = settings.kernels_dir() if self._overrides else None
        if overrides is None:
            return own
        override = overrides / own.name
        found = override.is_file()
        if override not in self._told:
            self._told.add(override)
            if found:
                log.warning("%s: replaced by %s (NPU_EMBED_KERNELS)", file, override)
            else:
                log.info("%s: the bundle's, there is no %s", file, override)
        return override if found else own

    def _check_kernel_files(self) -> None:
        for x in self.manifest.xclbins.values():
            size = self._kernel_file(x.file, x.line).stat().st_size
            if size > xclbin.MAX_FILE_BYTES:
                raise BundleError(
                    f"manifest.txt:{x.line}: {x.file} has {size} bytes, wanted at most "
                    f"{xclbin.MAX_FILE_BYTES}; re-export the bundle."
                )
        for gemm in self.specs.all_gemms:
            for stream in gemm.streams:
                self._stream_file(stream.insts, stream.line)
            of_images = self.published and gemm.key.startswith(published.VISION)
            if gemm.max_rows < self.max_rows and not of_images:
                raise BundleError(
                    f"manifest.txt:{gemm.line}: gemm {gemm.key} runs at most {gemm.max_rows} rows, "
                    f"wanted max_rows {self.max_rows}; re-export the bundle."
                )
        for mha in self.specs.all_mhas:
            check_words(mha, self._stream_file(mha.insts, mha.line)[1] // 4)

    def _stream_file(self, file: str, line: int) -> tuple[Path, int]:
        """A stream's file and how many bytes it has."""
        path = self._kernel_file(file, line)
        size = path.stat().st_size
        if size == 0 or size % 4 or size > MAX_STREAM_BYTES:
            raise BundleError(
                f"manifest.txt:{line}: {file} has {size} bytes, wanted 32-bit words, at most "
                f"{MAX_STREAM_BYTES} bytes; re-export the bundle."
            )
        return path, size

    def open_tokenizer(self, *, plain_specials: bool = False) -> Tokenizer:
        """The bundle's tokenizer, limited to max_tokens; see Tokenizer.from_file.

        Raises:
            BundleError: its file or tables are missing or damaged.
            InputError: the bundle is for images only.
        """
        if not self.max_tokens:
            raise InputError(
                f"{self.name}: a bundle for images only (no param max_text_tokens), wanted one "
                "that embeds texts; export or download it with its text tables."
            )
        if self.published:
            return Tokenizer.limited(
                self.tensors.file,
                read_tokenizer(self.manifest, self.tensors),
                self.max_tokens,
                plain_specials=plain_specials,
            )
        return Tokenizer.from_file(
            bundle_path(self.path, TOKENIZER, str(self.path)),
            max_tokens=self.max_tokens,
            plain_specials=plain_specials,
        )

    @cached_property
    def has_array_programs(self) -> bool:
        """Whether the kernels are array programs, which only the emulated NPU can run."""
        return any(holds_array_program(self.xclbin(ctx)) for ctx in self.manifest.xclbins)

    def xclbin(self, ctx: str) -> Path:
        """The xclbin file of a context key.

        Raises:
            BundleError: it is gone.
        """
        record = self.manifest.xclbins[ctx]
        return self._kernel_file(record.file, record.line)

    def stream(self, spec: GemmSpec | MhaSpec, file: str) -> bytes:
        """A spec's instruction stream, decoded once to see that it is one and is this spec's.

        Raises:
            BundleError: as `decoded_stream`; or a GEMM's is for another number of rows or reads
                other weights than its other streams, an MHA's words to patch are not what the
                record says.
        """
        if (known := self._streams.get((spec.line, file))) is not None:
            return known
        data, stream = self.decoded_stream(spec, file)
        if isinstance(spec, GemmSpec):
            exact = not self.published  # which does not say how many columns are results
            problem = streamcheck.find_problem(spec, file, stream, exact=exact)
            if problem is None and exact:
                problem = self._weights_problem(spec, file, stream)
        else:
            problem = wordcheck.find_problem(spec, stream, self.no_window)
        if problem:
            raise BundleError(problem)
        self._streams[spec.line, file] = data
        return data

    def decoded_stream(self, spec: GemmSpec | MhaSpec, file: str) -> tuple[bytes, txn.Stream]:
        """A spec's instruction stream and what it decodes to, as far as a stream alone can tell.

        Raises:
            BundleError: unreadable, malformed, or for another kernel.
        """
        path, _ = self._stream_file(file, spec.line)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise BundleError(f"{file}: cannot be read ({error.strerror}).") from error
        try:
            stream = txn.decode(data)
        except txn.TxnError as error:
            raise BundleError(
                f"{file}: no instruction stream ({error}); re-export the bundle."
            ) from error
        if stream.header.dev_gen != TARGETS[self.target]:
            raise BundleError(
                f"{file}: for device generation {stream.header.dev_gen}, wanted "
                f"{TARGETS[self.target]} of {self.target}; re-export the bundle."
            )
        wanted = GEMM_BUFFERS if isinstance(spec, GemmSpec) else MHA_BUFFERS
        patched = {op.arg_index for op in stream.ops if isinstance(op, txn.DdrPatch)}
        if patched != set(range(wanted)):
            raise BundleError(
                f"{file}: uses buffers {sorted(patched)}, wanted {list(range(wanted))} of "
                f"{type(spec).__name__.removesuffix('Spec').lower()}; it belongs to another "
                "kernel, re-export the bundle."
            )
        return data, stream

    def _weights_problem(self, gemm: GemmSpec, file: str, stream: txn.Stream) -> str | None:
        """What is wrong with how much a stream reads of B, given what the first one loaded read."""
        found = streamcheck.packed_bytes(stream)
        wanted = self._packed_bytes.setdefault(gemm.line, found)
        if found is None or wanted is None or found == wanted:
            return None
        return (
            f"{file}: reads {found} bytes of B, wanted {wanted} as the other streams of gemm "
            f"{gemm.key} (manifest.txt:{gemm.stream_of(file).line}); re-export the bundle."
        )

    def packed_bytes(self, gemm: GemmSpec) -> int | None:
        """How many bytes of packed weights a GEMM's streams read; None where that is not known.

        In the published layout, the shortest of them.

        Raises:
            BundleError: as `stream`.
        """
        if gemm.line not in self._packed_bytes:
            stream = txn.decode(self.stream(gemm, gemm.streams[0].insts))
            self._packed_bytes[gemm.line] = streamcheck.packed_bytes(stream)
        return self._packed_bytes[gemm.line]

    def prompt(self, name: str | None) -> str:
        """The text of a prompt; of the default prompt for None, empty where there is none.

        Raises:
            InputError: no prompt of that name; the message lists the names there are.
        """
        if name is None:
            name = self.manifest.params.get("default_prompt")
            if name is None:
                return ""
        if not isinstance(name, str) or name not in self.prompts:
            known = ", ".join(sorted(self.prompts)) or "none"
            raise InputError(f"prompt={name!r}: unknown prompt, this bundle has: {known}.")
        return self.prompts[name]

    def close(self) -> None:
        """Unmap the tensors; views of them must not be used afterwards."""
        self.tensors.close()


def no_such_bundle(path: Path) -> BundleError:
    """The error where no folder is of that name, the same whatever wanted one."""
    return BundleError(
        f"{path}: no such folder, wanted a bundle; make one with `npu-embed export CHECKPOINT "
        "OUT`, or the default one with `npu-embed get minilm`."
    )


def _files(path: Path, manifest: Manifest, specs: Specs) -> list[str]:
    """The files that a bundle is made of, as its records name them, but the manifest itself."""
    files = [x.file for x in manifest.xclbins.values()]
    files += [stream.insts for gemm in specs.all_gemms for stream in gemm.streams]
    files += [mha.insts for mha in specs.all_mhas]
    fixed = (SAFETENSORS, TENSORS_TXT, TENSORS_BIN, TOKENIZER)
    return [*files, *(file for file in fixed if os.path.lexists(path / file))]


def _prompts(manifest: Manifest) -> dict[str, str]:
    """Prompt texts by name."""
    prompts: dict[str, str] = {}
    for record in manifest.tagged("prompt"):
        name = record.field(0, "NAME")
        if name in prompts:
            raise record.error(f"prompt {name} for the second time, wanted each once")
        prompts[name] = record.field_hex(1, "a prompt's text")
    return prompts
