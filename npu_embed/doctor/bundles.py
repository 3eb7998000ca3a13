"""The bundle: which one, for which NPU, and how many contexts it wants at once."""

from __future__ import annotations

import os
import posixpath
from pathlib import Path

from .. import fetch, settings
from ..bundle import Bundle
from ..errors import NpuEmbedError, SettingError
from .findings import Fact, Finding, passed


def chosen_bundle(bundle: str | Path | None) -> Path | None:
    """The folder of the bundle that would be used; None where it is a recipe's, not made yet.

    bundle: a folder, or where there is none of that name, a recipe's; None is NPU_EMBED_BUNDLE,
    else the default one. Nothing is fetched.

    Raises:
        FetchError: the recipe is damaged.
        SettingError: the name is empty.
    """
    if bundle == "":  # which as a path is the current folder
        raise SettingError(
            "bundle '': empty, wanted a folder or the name of a recipe; leave it out for the "
            "default one"
        )
    given = settings.bundle() if bundle is None else bundle
    name = fetch.DEFAULT_RECIPE if given is None else str(given)
    if given is not None and (os.path.lexists(given) or name not in fetch.recipe_names()):
        return Path(given)
    recipe = fetch.read_recipe(name)
    made = settings.cache_dir() / "bundles" / f"{recipe.name}-{recipe.key}"
    return made if made.is_dir() else None


def no_bundle() -> Finding:
    """A recipe's bundle is not there yet."""
    return Finding(
        "bundle",
        "WARN",
        "not-made",
        "the default one, or the one that is named, is not made yet",
        "one to check",
        "`npu-embed get minilm` makes it, or name one: `npu-embed doctor BUNDLE`",
    )


def open_bundle(path: Path) -> Bundle | Finding:
    """The opened bundle, or why it cannot be."""
    try:
        return Bundle.open(path)
    except NpuEmbedError as error:
        return Finding("bundle", "FAIL", "damaged", str(error).rstrip("."))


def weights_bytes(path: Path) -> int:
    """The size of a bundle's tensors, most of which goes to the device; 0 where there are none."""
    found = 0
    for name in ("tensors.safetensors", "tensors.bin"):
        try:
            found += (path / name).stat().st_size
        except OSError:
            continue
    return found


def check_target(
    bundle: Bundle, generation: str | None, *, on_npu: bool, demanded: bool = False
) -> Finding:
    """Whether a bundle's kernels are for this device.

    generation is the device's, None where not known; on_npu: it is a real one; demanded: only a
    real one will do.
    """
    facts: dict[str, Fact] = {"target": bundle.target, "array_programs": bundle.has_array_programs}
    shown = f"{bundle.name} has kernels for {bundle.target}"
    if demanded and bundle.has_array_programs:
        return Finding(
            "target",
            "FAIL",
            "array-programs",
            f"{bundle.name} has array programs, which only the emulated NPU runs",
            "kernels for an NPU's cores, as --device npu demands",
            "name a bundle that has them: `npu-embed doctor BUNDLE`; `--device emulated` checks "
            "this one",
            facts,
        )
    if generation is not None and bundle.target != generation:
        return Finding(
            "target",
            "FAIL",
            "other-generation",
            shown,
            f"{generation}, which this device is",
            f"export it with --target {generation}"
            + ("" if on_npu else f", or set NPU_EMBED_EMU_PROFILE={bundle.target}"),
            facts,
        )
    if not on_npu and not bundle.has_array_programs:
        return Finding(
            "target",
            "WARN",
            "compiled",
            f"{shown}, compiled for real cores",
            "an NPU to run them",
            "nothing of it is run here, its files are checked: `npu-embed inspect` shows them",
            facts,
        )
    return passed("target", shown, **facts)


def check_contexts(bundle: Bundle, limit: int | None) -> Finding:
    """Whether the contexts of a bundle fit into the device's slots together."""
    used = {gemm.ctx for gemm in bundle.specs.all_gemms}
    used |= {mha.ctx for mha in bundle.specs.all_mhas}
    xclbins = [bundle.manifest.xclbins[ctx] for ctx in used]
    places = {(posixpath.normpath(x.file), x.kernel_name) for x in xclbins}
    facts = {"contexts": len(places), "limit": limit}
    if limit is not None and len(places) > limit:
        return Finding(
            "contexts",
            "WARN",
            "swaps",
            f"{bundle.name} has {len(places)} contexts",
            f"at most the device's {limit}",
            "it runs, but each forward drops and makes contexts, some 35 ms each",
            facts,
        )
    of = f"of the device's {limit}" if limit is not None else "the device's limit is not known"
    return passed("contexts", f"{len(places)}, {of}", **facts)
