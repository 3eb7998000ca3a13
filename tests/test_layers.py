"""A file imports only from files below it; imports inside functions count too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "npu_embed"

# Every module, from the ground up: each imports only from those before it.
LAYERS = """
errors eviction paths settings
jit.lanes jit jit.scalars jit.sums jit.rows jit.rms jit.heads jit.gemma jit.compiled
bf16 cores events trace progress idle nearness flights

emulator
emulator.txn_ops emulator.txn_layout emulator.txn_codec emulator.txn_legacy emulator.txn_text
emulator.txn
emulator.xclbin_format emulator.xclbin_xml emulator.xclbin_read emulator.xclbin_write
emulator.xclbin
emulator.enums emulator.profile emulator.slots emulator.heap emulator.memory
emulator.dma emulator.heads emulator.flows emulator.controller emulator.program emulator.erf
emulator.epilogue_numbers emulator.epilogues emulator.softmax
emulator.llvm emulator.llvm.registers emulator.llvm.vectors emulator.llvm.panel_code
emulator.llvm.gemm_code emulator.llvm.tile_code emulator.llvm.tile_permission
emulator.llvm.attention_code emulator.llvm.module emulator.llvm.kept emulator.llvm.machine
emulator.weights emulator.gemm_call emulator.gemm emulator.mha_call emulator.mha
emulator.mha_list emulator.array
emulator.ert emulator.command emulator.binding
emulator.faults emulator.hardware
emulator.pyxrt_xclbin emulator.pyxrt_device emulator.pyxrt_bo emulator.pyxrt_run
emulator.pyxrt_runlist emulator.pyxrt

jsontext records manifest kernel_fields gemm_records specs wordcheck streamcheck streamlint
tensors tensors_txt tokenizercheck tokenizer images
published published_tokenizer
debuglines chrometrace seeing
driver stats containers buffers kernels runlists device waiting
bundle lint rows runs loaded contexts watching npu schedule hostops attention rms heads packing
models.checks models.forward models.bert models.roberta
models.gemma_params models.gemma_weights models.gemma models.gemma3_text
models.gemma4_vision_params models.gemma4_vision models.image_encoder models.embedding_gemma2
models.embedding_gemma2_published
models

exporters.geometry exporters.pack exporters.descriptors exporters.streams exporters.xclbins
exporters.jsonfile exporters.limits exporters.checkpoint exporters.parts exporters.kernels
exporters.buckets exporters.weights
exporters.reference
exporters.gemma_reference exporters.selfcheck exporters.assemble exporters.dense
exporters.bert_families exporters.bert_config exporters.bert
exporters.gemma_config exporters.gemma_layers exporters.gemma3_config exporters.gemma3_text
exporters.embedding_gemma2_config
exporters.gemma4_vision_config exporters.gemma4_vision_reference exporters.gemma4_vision
exporters.image_reference exporters.embedding_gemma2
exporters.published_tokenizer exporters.published_vision exporters.published
exporters.exporter exporters
support
fetch

outcomes imagecheck canary recovery
vectors quantization queries streaming image_queries token_queries tokenizing turns embedder
selfcheck api
__init__

batch.formats batch.row batch.lines batch.delimited batch.tables batch.folder batch.sources
batch.columns batch.scan batch.shards batch.writers batch.table_writers batch.stored batch.compute
batch.engines
batch.calibration batch.job batch.fingerprint batch.meter batch.spool batch.assemble batch.run
batch

integrations integrations.extras integrations.engine
integrations.langchain integrations.llama_index integrations.chroma integrations.haystack
integrations.mteb integrations.shipped integrations.ray

profiling.texts profiling.table profiling.measure profiling.operands profiling.reference
profiling.compare profiling.timeline profiling

doctor.findings doctor.ioctls doctor.probe doctor.machine doctor.sandbox doctor.hardware
doctor.node
doctor.memlock doctor.xrt doctor.binding doctor.slots doctor.software doctor.bundles
doctor.known_kernels doctor.answers doctor.runs doctor.child doctor.examination doctor

server server.options server.messages server.worker server.link server.metrics server.queue
server.dispatcher server.refusals server.request server.openai_api server.tei_api server.prepare
server.budgets server.service server.page server.app server.connection server.run

cli.output cli.tracing cli.bundles cli.batch cli.embed cli.profile cli.export cli.get
cli.inspect_insts cli.inspect_xclbin cli.inspect_bundle cli.inspect_lint cli.inspect cli.check
cli.doctor cli.serve cli
__main__
""".split()


def modules() -> dict[str, Path]:
    """Every module of the package by name, the package itself as __init__."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if len(parts) > 1 and parts[-1] == "__init__":
            parts = parts[:-1]
        found[".".join(parts)] = path
    return found


MODULES = modules()


def imported_names(node: ast.AST, package: tuple[str, ...]) -> list[str]:
    """The dotted names an import or a call of import_module binds, in a file of that package."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = [node.module] if node.module else []
        if node.level:
            base = ["npu_embed", *package[: len(package) - node.level + 1], *base]
        return [".".join([*base, alias.name]) for alias in node.names]
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
        return [str(a.value) for a in node.args if isinstance(a, ast.Constant)]
    return []


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module of this package) of every import, also where the module is named in a str.

    What only a type checker imports is left out: it binds nothing when the program runs.
    """
    package = path.relative_to(ROOT).parent.parts
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for block in [node for node in ast.walk(tree) if isinstance(node, ast.If)]:
        if isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING":
            block.body = []
    for node in ast.walk(tree):
        for name in imported_names(node, package):
            head, _, rest = name.partition(".")
            if head != "npu_embed":
                continue
            if rest not in MODULES:  # a name in a module
                rest = rest.rpartition(".")[0]
            yield getattr(node, "lineno", 0), rest or "__init__"


def test_the_list_has_every_module_once() -> None:
    assert len(LAYERS) == len(set(LAYERS))
    assert set(LAYERS) == set(MODULES)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_module_imports_only_from_below(module: str) -> None:
    below = set(LAYERS[: LAYERS.index(module)]) if module in LAYERS else set(LAYERS)
    path = MODULES[module]
    above = [
        f"{path.relative_to(ROOT.parent)}:{line} imports {name}"
        for line, name in imports(path)
        if name not in below and name != module
    ]
    assert not above


@pytest.mark.parametrize("module", sorted(m for m in MODULES if m.startswith("emulator.")))
def test_the_emulator_knows_nothing_of_the_engine(module: str) -> None:
    known = {"errors", "settings", "bf16", "cores", "jit", "jit.lanes"}
    for line, name in imports(MODULES[module]):
        assert name in known or name.startswith("emulator"), f"{module}:{line} imports {name}"


@pytest.mark.parametrize("module", sorted(m for m in MODULES if m.startswith("exporters.")))
def test_the_exporter_and_the_emulator_share_formats_and_no_maths(module: str) -> None:
    shared = {"emulator.txn", "emulator.xclbin"}
    for line, name in imports(MODULES[module]):
        assert not name.startswith("emulator") or name in shared, f"{module}:{line}: {name}"


def test_an_import_in_a_function_or_by_name_is_seen() -> None:
    assert "emulator.pyxrt" in {name for _, name in imports(ROOT / "driver.py")}
    assert "fetch" in {name for _, name in imports(ROOT / "embedder.py")}
