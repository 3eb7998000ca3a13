"""The XML metadata of an xclbin -> KernelInfo."""

import re
from xml.etree import ElementTree

from .xclbin_format import Argument, KernelInfo, XclbinError

_NUMBER = re.compile(r"0[xX][0-9a-fA-F]{1,16}|0|[1-9][0-9]{0,18}")
_REMEDY = "make or download the xclbin again."


def parse_kernels(data: bytes) -> tuple[KernelInfo, ...]:
    """The kernels in the metadata, wherever in the document they stand; connections not filled in.

    Raises:
        XclbinError: `data` is not UTF-8 XML, declares a document type, or a kernel in it lacks
            what XRT needs.
    """
    try:
        text = data.rstrip(b"\0").decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise XclbinError(
            f"EMBEDDED_METADATA: byte {error.start} is not UTF-8, wanted an XML text; {_REMEDY}"
        ) from error
    # A document type is the only way to define entities, and a few nested ones expand to gigabytes.
    if "<!DOCTYPE" in text:
        raise XclbinError(
            f"EMBEDDED_METADATA: found <!DOCTYPE, wanted XML without a document type; {_REMEDY}"
        )
    # The encoding is given because the document's own declaration could hide text from the check.
    parser = ElementTree.XMLParser(encoding="utf-8")
    try:
        root = ElementTree.fromstring(text.encode("utf-8"), parser)
    except ElementTree.ParseError as error:
        raise XclbinError(
            f"EMBEDDED_METADATA: {error}, wanted well-formed XML; {_REMEDY}"
        ) from error
    return tuple(_parse_kernel(element) for element in root.iter("kernel"))


def _parse_kernel(element: ElementTree.Element) -> KernelInfo:
    name = _attribute(element, "name", "kernel")
    where = f"kernel {name!r}"
    extended = element.find("extended-data")
    kernel_id = None if extended is None else extended.get("dpu_kernel_id")
    return KernelInfo(
        name=name,
        args=_parse_args(element, where),
        instances=tuple(
            _attribute(instance, "name", f"{where}, instance")
            for instance in element.findall("instance")
        ),
        dpu_kernel_id=None if kernel_id is None else _number(kernel_id, f"{where}, dpu_kernel_id"),
        type=element.get("type", ""),
    )


def _parse_args(kernel: ElementTree.Element, where: str) -> tuple[Argument, ...]:
    """The arguments in the order of their indices, which count from 0 without a gap.

    Several elements of one index are the parts of one argument. One without an index is local to
    the kernel and left out; both as XRT does.
    """
    merged: dict[int, Argument] = {}
    for element in kernel.findall("arg"):
        name = _attribute(element, "name", f"{where}, arg")
        here = f"{where}, arg {name!r}"
        if not _attribute(element, "id", here):
            continue
        index, qualifier, size, offset = (
            _number(_attribute(element, key, here), f"{here}, {key}")
            for key in ("id", "addressQualifier", "size", "offset")
        )
        first = merged.get(index)
        if first is None:
            kind = element.get("type", "")
            merged[index] = Argument(name, index, qualifier, size, offset, kind)
        else:
            merged[index] = Argument(
                first.name,
                index,
                first.qualifier,
                first.size_bytes + size,
                min(first.offset_bytes, offset),
                first.type,
            )
    indices = sorted(merged)
    if indices != list(range(len(indices))):
        missing = next(i for i, index in enumerate(indices) if i != index)
        raise XclbinError(
            f"{where}: mismatched argument index: found {indices[missing]}, wanted {missing}; "
            f"{_REMEDY}"
        )
    return tuple(merged[index] for index in indices)


def _attribute(element: ElementTree.Element, key: str, where: str) -> str:
    value = element.get(key)
    if value is None:
        raise XclbinError(f"{where}: no attribute {key!r}, wanted one; {_REMEDY}")
    return value


def _number(text: str, where: str) -> int:
    """The decimal or 0x number in `text`; 0 for none at all, as XRT reads it."""
    if text and not _NUMBER.fullmatch(text):
        raise XclbinError(f"{where}: {text[:40]!r}, wanted a number of at most 64 bits; {_REMEDY}")
    return int(text, 0) if text else 0
