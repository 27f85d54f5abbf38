"""Devices that pods can claim, read from ResourceSlices and DeviceClasses (resource.k8s.io/v1).

Names of attributes and capacities are those of NVIDIA's driver: kubernetes-sigs/dra-driver-nvidia-gpu,
cmd/gpu-kubelet-plugin, deviceinfo.go, mig.go and consumable_shares.go.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

from specdecode_operator.api.crd_validation import CelError, UnsupportedCelError, evaluator_with
from specdecode_operator.cluster.quantities import quantity
from specdecode_operator.sizing.arithmetic import MIB
from specdecode_operator.sizing.devices import UNNAMED_GPU, MeasuredProduct, find_device
from specdecode_operator.untrusted import mapping, name_of, objects, whole_number

_TYPE, _PRODUCT, _PROFILE, _MEMORY = "type", "productName", "profile", "memory"
_VFIO: Final = "vfio"
_TAINTS: Final = ("NoSchedule", "NoExecute")
_KINDS: Final = ("string", "int", "bool", "version")
_COST_OF_ANY, _COST_OF_PATTERN = 300, 10
_LONGEST_TEXT: Final = 4096
_CALL: Final = re.compile(r"([A-Za-z_]\w*)(?:\s|//[^\n]*)*\(")
_BUILT_IN: Final = frozenset(
    {"has", "in", "size", "contains", "startsWith", "endsWith", "matches", "string", "int", "uint", "double"}
)

Counters = Mapping[str, int]


@dataclass(frozen=True)
class Device:
    """One device of a ResourceSlice."""

    driver: str
    pool: str
    node: str  # Its node, or its pool if several nodes can reach it
    attributes: Mapping[str, Mapping[str, Any]]  # By domain and name, as CEL reads them
    capacity: Mapping[str, Mapping[str, int]]
    is_shared: bool = False  # Whether several claims may share it
    share_bytes: int | None = None  # Memory of a shared device that a claim gets by default; None for all of it
    is_tainted: bool = False
    counters: Mapping[str, Counters] = field(default_factory=dict)  # Consumption of the pool's counters, by set

    @property
    def product(self) -> str:
        """Product label of a GPU with known memory, or the name of a `MeasuredProduct`; empty if neither is known."""
        label = "-".join(str(self._attribute(_PRODUCT) or "").split())
        profile = self._attribute(_PROFILE)
        if profile is None and find_device(label) is not None:
            return label
        mebibytes = (self.memory_bytes or 0) // MIB
        if not mebibytes:
            return label
        # As GPU-feature-discovery writes profiles: 1g.10gb.me for 1g.10gb+me.
        return str(MeasuredProduct(label or UNNAMED_GPU, mebibytes, profile and str(profile).replace("+", ".")))

    @property
    def is_slice(self) -> bool:
        """Whether it is a MIG device."""
        return self._attribute(_PROFILE) is not None

    @property
    def memory_bytes(self) -> int | None:
        """Memory that its driver reports."""
        return self.capacity.get(self.driver, {}).get(_MEMORY)

    @property
    def refusal(self) -> str | None:
        """Return why no plan can use it, or None."""
        if self._attribute(_TYPE) == _VFIO:
            return "passed through to virtual machines (type vfio)"
        if self.is_tainted:
            return "tainted"
        if self.is_shared and self.share_bytes is not None and self.share_bytes < (self.memory_bytes or 0):
            return (
                "shared, and the driver does not limit an engine to its share of the memory: use whole GPUs or MIG"
                " devices"
            )
        return None

    def _attribute(self, name: str) -> Any:
        return self.attributes.get(self.driver, {}).get(name)


@dataclass(frozen=True)
class Selector:
    """A CEL expression about devices."""

    place: str  # Where it is written
    text: str
    is_too_costly: bool = False

    @property
    def cost(self) -> int:
        """Relative cost of evaluating it for one device."""
        return _COST_OF_ANY + len(self.text) * (_COST_OF_PATTERN if "matches" in self.text else 1)

    def mismatch(self, device: Device) -> str | None:
        """Return why a device does not match, or None; raises UnsupportedCelError."""
        if self.is_too_costly or not _has_bounded_cost(self.text):
            raise UnsupportedCelError(self.place)
        values = {
            "driver": device.driver,
            "attributes": device.attributes,
            "capacity": device.capacity,
            "allowMultipleAllocations": device.is_shared,
        }
        try:
            is_match = evaluator_with(_FUNCTIONS, {"device": values})(self.text)
        except UnsupportedCelError:
            raise
        except CelError as error:
            why = f"reads {error}, which devices lack" if isinstance(error.__cause__, KeyError) else str(error)
            return f"{self.place} cannot be evaluated: {why}"
        return None if is_match is True else f"{self.place} is false"


@dataclass(frozen=True, eq=False)
class DeviceInventory:
    """All devices and DeviceClasses of a cluster. Compared by identity, because it may be large."""

    devices: tuple[Device, ...] = ()
    classes: Mapping[str, tuple[Selector, ...]] = field(default_factory=dict)
    counters: Mapping[tuple[str, str], Mapping[str, Counters]] = field(default_factory=dict)  # By driver and pool
    is_known: bool = True  # False if the operator could not list them
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)  # Answers of others about these devices

    def at_once(self, devices: Sequence[Device]) -> int:
        """Return how many of these devices can be allocated at the same time.

        Partitions of one GPU consume its counters, so not all of them can exist at once.
        """
        left: dict[tuple[str, str, str, str], int] = {}
        taken = 0
        for device in devices:
            wanted = {
                (device.driver, device.pool, name, counter): amount
                for name, counters in device.counters.items()
                for counter, amount in counters.items()
            }
            for driver, pool, name, counter in wanted.keys() - left.keys():
                available = self.counters.get((driver, pool), {}).get(name, {}).get(counter, 0)
                left[driver, pool, name, counter] = available
            if all(left[each] >= amount for each, amount in wanted.items()):
                taken += 1
                for each, amount in wanted.items():
                    left[each] -= amount
        return taken


UNKNOWN_DEVICES: Final = DeviceInventory(is_known=False)


def read_inventory(slices: Iterable[Mapping[str, Any]], classes: Iterable[Mapping[str, Any]]) -> DeviceInventory:
    """Return the devices of the newest generation of each pool, and the DeviceClasses."""
    newest: dict[tuple[str, str], int] = {}
    specs = [mapping(each, "spec") for each in slices]
    for spec in specs:
        newest[_pool(spec)] = max(newest.get(_pool(spec), 0), _generation(spec))
    current = [spec for spec in specs if _generation(spec) == newest[_pool(spec)]]
    counters: dict[tuple[str, str], dict[str, Counters]] = {}
    for spec in current:
        sets = {name_of(each): _amounts(mapping(each, "counters")) for each in objects(spec, "sharedCounters")}
        counters.setdefault(_pool(spec), {}).update(sets)
    devices = tuple(_device(spec, each) for spec in current for each in objects(spec, "devices"))
    named = {name_of(mapping(each, "metadata")): _selectors(each) for each in classes}
    return DeviceInventory(devices, named, counters)


def _selectors(body: Mapping[str, Any]) -> tuple[Selector, ...]:
    name, spec = name_of(mapping(body, "metadata")), mapping(body, "spec")
    texts = [str(mapping(each, "cel").get("expression")) for each in objects(spec, "selectors")]
    return tuple(Selector(f"selector {number} of DeviceClass {name}", text) for number, text in enumerate(texts))


def _pool(spec: Mapping[str, Any]) -> tuple[str, str]:
    return str(spec.get("driver")), name_of(mapping(spec, "pool"))


def _generation(spec: Mapping[str, Any]) -> int:
    return whole_number(mapping(spec, "pool").get("generation")) or 0


def _device(spec: Mapping[str, Any], body: Mapping[str, Any]) -> Device:
    driver, pool = _pool(spec)
    memory = mapping(mapping(body, "capacity"), _MEMORY)
    share = mapping(memory, "requestPolicy").get("default")
    return Device(
        driver,
        pool,
        str(spec.get("nodeName") or body.get("nodeName") or pool),
        _by_domain({name: _value(each) for name, each in mapping(body, "attributes").items()}, driver),
        _by_domain(_amounts(mapping(body, "capacity")), driver),
        is_shared=body.get("allowMultipleAllocations") is True,
        share_bytes=None if share is None else _amount(share),
        is_tainted=any(each.get("effect") in _TAINTS for each in objects(body, "taints")),
        counters={
            str(each.get("counterSet")): _amounts(mapping(each, "counters"))
            for each in objects(body, "consumesCounters")
        },
    )


def _by_domain(named: Mapping[str, Any], driver: str) -> dict[str, dict[str, Any]]:
    """Return values by domain and name; names without a domain belong to the driver."""
    found: dict[str, dict[str, Any]] = {driver: {}}
    for name, value in named.items():
        domain, _, short = name.rpartition("/")
        found.setdefault(domain or driver, {})[short] = value
    return found


def _value(attribute: Any) -> Any:
    given = attribute if isinstance(attribute, dict) else {}
    value = next((given[kind] for kind in _KINDS if kind in given), None)
    return _version(value) if "version" in given else value


def _amounts(named: Mapping[str, Any]) -> dict[str, int]:
    return {name: _amount(each.get("value") if isinstance(each, dict) else None) for name, each in named.items()}


def _amount(text: object) -> int:
    return int(quantity(text) or 0)


def _version(text: object) -> list[int]:
    """Return a semantic version as a comparable list, without pre-release and build."""
    core = str(text).partition("+")[0].partition("-")[0]
    return [whole_number(part) or 0 for part in core.split(".")]


def _replaced(text: str, old: str, new: str) -> str:
    if len(text) + text.count(old) * len(new) > _LONGEST_TEXT:
        raise ValueError(f"replace: the result is longer than {_LONGEST_TEXT} characters")
    return text.replace(old, new)


@lru_cache(maxsize=1024)
def _has_bounded_cost(text: str) -> bool:
    """Return whether the cost of an expression grows only with its length: users write them.

    Nested macros, such as ``all``, and counted or Unicode classes in patterns can take hours or all memory. The API
    server limits their cost, and can evaluate them.
    """
    names = set(_CALL.findall(text))
    if "`" in text or not names <= _BUILT_IN | _FUNCTIONS.keys():
        return False
    return "matches" not in names or not ("\\" in text or "{" in text or "replace" in names)


_FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    "quantity": _amount,
    "semver": _version,
    "compareTo": lambda one, other: (one > other) - (one < other),
    "isGreaterThan": lambda one, other: one > other,
    "isLessThan": lambda one, other: one < other,
    "lowerAscii": str.lower,
    "upperAscii": str.upper,
    "replace": _replaced,
}
"""CEL functions beyond the base language that the scheduler supports in selectors."""
