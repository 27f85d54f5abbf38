"""Finds the GPU that people mean by a name."""

import re
from typing import Final

from specdecode_operator.estimate.fields import CaseError
from specdecode_operator.sizing.base.devices import Device, family_of, find_device, known_products
from specdecode_operator.sizing.base.units import GIB

_OTHER_MEMORY: Final = ("MIG", "NVL")
"""Words that make another device of the same family."""

_SMALLEST_GIB: Final = 16
"""Smaller numbers in a name count GPUs."""

_ROUNDED_NAME: Final = 0.05
"""By how much the number in a name may differ from what CUDA reports in GiB: 80 GB are 79.2, 96 GB are 95."""

_SAME_TOTAL: Final = 0.02
"""By how much the totals of boards of one family may differ and still be the same device here."""


SHORT_NAMES: Final = ("H100", "H200", "H20")
"""Names that stand alone for the board of most servers, whose memory no other board of the name falls short of. A100 is
none: there are boards of 40 GB."""


def full_product(name: str) -> str:
    """Return the product label that a short name stands for; any other as it is."""
    return find_named_gpu(name).product if name.upper() in SHORT_NAMES else name


def find_named_gpu(name: str) -> Device:
    """Return the device for a product label, ``H100``, or a name that holds one, such as ``H100 80GB``.

    Raises
    ------
    CaseError
        When no known device, or more than one, is meant.
    """
    exact = find_device(name)
    if exact is not None:
        return exact
    known = ", ".join(known_products())
    meant = [device for product in known_products() if (device := find_device(product)) and _is_meant(device, name)]
    if not meant:
        message = f"no memory figures are known for it: use one of {known}, or give gpu_total_gib"
        raise CaseError("gpu", name, message)
    largest = max(device.total_bytes for device in meant)
    if min(device.total_bytes for device in meant) < largest * (1 - _SAME_TOTAL):
        products = ", ".join(device.product for device in meant)
        raise CaseError("gpu", name, f"may be any of {products}: name one, or its memory, such as A100-80")
    return max(meant, key=lambda device: _likeness(device.product, name))


def _likeness(product: str, name: str) -> tuple[int, bool]:
    """Details that product and name share; among equals the board of most servers (SXM) wins."""
    details = product.upper().split("-")
    return sum(detail in name.upper() for detail in details), bool(re.search("SXM|HBM", product))


def _is_meant(device: Device, name: str) -> bool:
    """Whether a name holds the device's family, and nothing that contradicts its memory."""
    family = family_of(device.product).upper()
    details = device.product.upper().split("-")
    wanted = name.upper()
    # GH200 is no H200, and H1000 would be no H100.
    if not re.search(rf"(?<![A-Z0-9]){family.replace('-', '[ -]?')}(?![0-9])", wanted):
        return False
    if any((word in details) is not bool(re.search(rf"\b{word}", wanted)) for word in _OTHER_MEMORY):
        return False
    numbers = re.findall(r"(?<![A-Z0-9.])(\d+)(?: ?GI?B)?(?![A-Z0-9.])", wanted)
    # 6000 of RTX PRO 6000 and 480GB of GH200 480GB are no memory of the GPU.
    named = set(re.findall(r"\d+", device.product))
    asked = [int(number) for number in numbers if int(number) >= _SMALLEST_GIB and number not in named]
    return all(abs(device.total_bytes / GIB / number - 1) <= _ROUNDED_NAME for number in asked)
