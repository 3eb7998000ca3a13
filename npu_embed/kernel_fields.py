"""Fields that the records of all kernels have, checked."""

from .manifest import Manifest, Record

# Bounds are generous; they keep products far from what a size or an offset can hold.
MAX_DIM = 2**31 - 1
MAX_ELEMS = 2**32 - 1


def ctx_of(record: Record, manifest: Manifest) -> str:
    """The key of the xclbin that a kernel is in.

    Raises:
        BundleError: there is none of that key.
    """
    ctx = record.get("ctx")
    if ctx not in manifest.xclbins:
        known = ", ".join(manifest.xclbins) or "none"
        raise record.error(f"{record.tag} ctx is {ctx!r}, wanted the key of an xclbin ({known})")
    return ctx


def insts_of(record: Record) -> str:
    """The path of an instruction stream, relative to the bundle.

    Raises:
        BundleError: it is empty.
    """
    if insts := record.get("insts"):
        return insts
    raise record.error(f"{record.tag} insts is empty, wanted a path")


def elems_of(record: Record, key: str) -> int:
    """The length of a view in bf16 elements.

    Raises:
        BundleError: it is not 1 to MAX_ELEMS.
    """
    return record.get_int(key, minimum=1, maximum=MAX_ELEMS)
