"""Bundle: a model ready to run, its files checked against each other."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from .containers import holds_array_program
from .emulator import txn
from .errors import BundleError, InputError
from .manifest import Manifest, bundle_path
from .specs import GemmSpec, MhaSpec, Specs, check_words, parse_specs
from .tensors import Tensors, open_tensors
from .tokenizer import Tokenizer

TARGETS = {"npu1": 3, "npu2": 4}  # by name: the device generation in a stream's header
TOKENIZER = "tokenizer.json"
MAX_STREAM_BYTES = 16 << 20
GEMM_BUFFERS = 3  # A, B, C
MHA_BUFFERS = 4  # Q, K, V, O


class Bundle:
    """An opened bundle folder.

    name and family are the model's, target the NPU generation its kernels are for, prompts its
    prompt texts by name, no_window the window word that lets every key take part.
    """

    def __init__(self, path: Path, manifest: Manifest, specs: Specs, tensors: Tensors) -> None:
        self.path = path
        self.manifest = manifest
        self.specs = specs
        self.tensors = tensors
        self.name = manifest.param_str("name", path.name)
        self.family = manifest.param_str("family")
        self.target = manifest.param_str("target", "npu2")
        self.max_tokens = manifest.param_int("max_tokens", minimum=1, maximum=1 << 20)
        self.max_rows = manifest.param_int("max_rows", minimum=1, maximum=1 << 20)
        self.no_window = manifest.param_int("no_window", 0xFFFFFFFF, minimum=0, maximum=2**32 - 1)
        self.prompts = {
            r.field(0, "NAME"): r.field_hex(1, "a prompt's text") for r in manifest.tagged("prompt")
        }
        self._streams: dict[str, bytes] = {}

    @classmethod
    def open(cls, path: str | Path) -> Bundle:
        """The bundle in a folder, everything in it that can be checked without running it checked.

        Raises:
            BundleError: a file is missing, damaged, or contradicts the manifest.
        """
        path = Path(path)
        if not path.is_dir():
            raise BundleError(
                f"{path}: no such folder, wanted a bundle; make one with `npu-embed export "
                "CHECKPOINT OUT`, or the default one with `npu-embed get minilm`."
            )
        manifest = Manifest.read(path)
        specs = parse_specs(manifest)
        bundle = cls(path, manifest, specs, open_tensors(path))
        if bundle.target not in TARGETS:
            raise BundleError(
                f"manifest.txt: param target {bundle.target}, wanted npu1 or npu2; "
                "re-export the bundle."
            )
        bundle._check_kernel_files()
        return bundle

    def _check_kernel_files(self) -> None:
        for x in self.manifest.xclbins.values():
            bundle_path(self.path, x.file, f"manifest.txt:{x.line}")
        for gemm in self.specs.gemms.values():
            for file in gemm.insts:
                self._stream_bytes(file, gemm.line)
            if gemm.max_rows < self.max_rows:
                raise BundleError(
                    f"manifest.txt:{gemm.line}: gemm {gemm.key} runs at most {gemm.max_rows} rows, "
                    f"wanted max_rows {self.max_rows}; re-export the bundle."
                )
        for mha in self.specs.all_mhas:
            check_words(mha, self._stream_bytes(mha.insts, mha.line) // 4)

    def _stream_bytes(self, file: str, line: int) -> int:
        size = bundle_path(self.path, file, f"manifest.txt:{line}").stat().st_size
        if size == 0 or size % 4 or size > MAX_STREAM_BYTES:
            raise BundleError(
                f"manifest.txt:{line}: {file} has {size} bytes, wanted 32-bit words, at most "
                f"{MAX_STREAM_BYTES} bytes; re-export the bundle."
            )
        return size

    def open_tokenizer(self, *, plain_specials: bool = False) -> Tokenizer:
        """The bundle's tokenizer, limited to max_tokens; see Tokenizer.from_file."""
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
        return bundle_path(self.path, record.file, f"manifest.txt:{record.line}")

    def stream(self, spec: GemmSpec | MhaSpec, file: str) -> bytes:
        """A spec's instruction stream, decoded once to see that it is one and is this spec's.

        Raises:
            BundleError: unreadable, malformed, or for another kernel.
        """
        if file in self._streams:
            return self._streams[file]
        path = bundle_path(self.path, file, f"manifest.txt:{spec.line}")
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
        self._streams[file] = data
        return data

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
