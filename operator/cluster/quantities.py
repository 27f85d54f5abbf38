"""Parse quantities of the Kubernetes API, such as 500m or 200Gi."""

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Final

_FACTORS: Final[Mapping[str, Decimal]] = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "": Decimal(1),
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate(("k", "M", "G", "T", "P", "E"), 1)},
    **{suffix: Decimal(1024) ** power for power, suffix in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), 1)},
}
_QUANTITY: Final = re.compile(r"(?P<number>[+-]?[0-9.]{1,32}(?:[eE][+-]?[0-9]{1,3})?)(?P<suffix>[a-zA-Z]{0,2})")


def quantity(text: object) -> Decimal | None:
    """Return the value of a Kubernetes quantity; None if it is not one."""
    found = _QUANTITY.fullmatch(str(text))
    if found is None or found["suffix"] not in _FACTORS:
        return None
    try:
        return Decimal(found["number"]) * _FACTORS[found["suffix"]]
    except InvalidOperation:
        return None
