"""Whether a ResourceQuota that is used up would have room if some of its pods ended."""

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, Final

from specdecode_operator.kube.untyped import mapping, objects

_FACTORS: Final[Mapping[str, Decimal]] = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "": Decimal(1),
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate(("k", "M", "G", "T", "P", "E"), 1)},
    **{suffix: Decimal(1024) ** power for power, suffix in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), 1)},
}
_QUANTITY: Final = re.compile(r"(?P<number>[+-]?[0-9.]{1,32}(?:[eE][+-]?[0-9]{1,3})?)(?P<suffix>[a-zA-Z]{0,2})")
_EXCEEDED: Final = re.compile(
    r"exceeded quota: [^,]*, requested: (?P<requested>[^ ]*), used: (?P<used>[^ ]*), limited: (?P<limited>[^ ]*)"
)
"""How the API server refuses a pod (apiserver/pkg/admission/plugin/resourcequota/controller.go)."""

Amounts = Mapping[str, Decimal]
"""Amounts by the names that quotas give them, such as ``requests.nvidia.com/gpu``."""


def quantity(text: object) -> Decimal | None:
    """Return the value of a Kubernetes quantity; None if it is not one."""
    found = _QUANTITY.fullmatch(str(text))
    if found is None or found["suffix"] not in _FACTORS:
        return None
    try:
        return Decimal(found["number"]) * _FACTORS[found["suffix"]]
    except InvalidOperation:
        return None


def counted(pod_spec: Mapping[str, Any]) -> dict[str, Decimal]:
    """Return what a pod counts for in a quota.

    What init containers and overhead add is left out, so it is a little less than the pod frees.
    """
    found = {"pods": Decimal(1), "count/pods": Decimal(1)}
    for container in objects(pod_spec, "containers"):
        resources = mapping(container, "resources")
        limits = mapping(resources, "limits")
        for name, text in {**limits, **mapping(resources, "requests")}.items():
            for called in (name, f"requests.{name}"):
                found[called] = found.get(called, Decimal(0)) + (quantity(text) or Decimal(0))
        for name, text in limits.items():
            called = f"limits.{name}"
            found[called] = found.get(called, Decimal(0)) + (quantity(text) or Decimal(0))
    return found


def has_room_without(refusal: str, freed: Amounts) -> bool | None:
    """Return whether a quota would take a pod that it refused, once some others have ended.

    None if the refusal does not say what is used, so that nobody can tell.
    """
    found = _EXCEEDED.search(refusal)
    if found is None:
        return None
    requested, used, limited = (_amounts(found[name]) for name in ("requested", "used", "limited"))
    if not requested or requested.keys() - used.keys() or requested.keys() - limited.keys():
        return None
    return all(used[name] - freed.get(name, Decimal(0)) + amount <= limited[name] for name, amount in requested.items())


def _amounts(text: str) -> dict[str, Decimal]:
    """Read amounts as a refusal lists them: ``pods=3,requests.nvidia.com/gpu=8``."""
    pairs = (each.partition("=") for each in text.split(","))
    read = {name: quantity(value) for name, _, value in pairs}
    return {name: value for name, value in read.items() if value is not None}
