"""What a server computes on, told by the resources that its container asks for."""

import math
import re
from collections.abc import Mapping
from typing import Any, Final

from specdecode_operator.engine.settings import Platform
from specdecode_operator.kube.nodes import GPU_RESOURCE
from specdecode_operator.kube.untyped import mapping
from specdecode_operator.migration.builder import MigrationError, SpecBuilder
from specdecode_operator.migration.server_command import plain_environment

_ACCELERATOR: Final = re.compile(r"(nvidia|amd|habana\.ai|intel|aws\.amazon|google|huawei)\b.*/|.*/(gpu|tpu|npu|gaudi)")
_NETWORK: Final = re.compile(r".*(rdma|hostdev|efa|sriov|infiniband)", re.IGNORECASE)
_UNIT_BYTES: Final = {
    "": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
}  # fmt: skip


def find_platform(container: Mapping[str, Any], where: str) -> tuple[Platform, int]:
    """Return what the server computes on, and how many GPUs.

    Raises
    ------
    MigrationError
        When it is something that the operator cannot plan for.
    """
    amounts = _amounts(container)
    place = f"{where}.resources.limits"
    for name, amount in amounts.items():
        if name != GPU_RESOURCE and _ACCELERATOR.match(name) and not _NETWORK.match(name):
            fix = f"only whole NVIDIA GPUs ({GPU_RESOURCE}) and CPUs are planned for: keep this Deployment as it is"
            raise MigrationError(f"{place}.{name}", str(amount), fix)
    gpus = str(amounts.get(GPU_RESOURCE, "0"))
    if not gpus.isdecimal():
        raise MigrationError(f"{place}.{GPU_RESOURCE}", gpus, "must be a whole number")
    if int(gpus) > 0:
        return Platform.GPU, int(gpus)
    env, image = plain_environment(container), str(container.get("image") or "").lower()
    if "cpu" in image or any(name.startswith("VLLM_CPU_") for name in env):
        return Platform.CPU, 0
    fix = "say how many GPUs the server has (an image or variables for CPU would tell of one without)"
    raise MigrationError(f"{place}.{GPU_RESOURCE}", "nothing", fix)


def take_cpu(container: Mapping[str, Any], builder: SpecBuilder) -> None:
    """Take cores and memory of a server without GPUs; what is missing must be decided."""
    amounts = _amounts(container)
    builder.set("accelerator.type", "CPU")
    cores, memory = _cores(amounts.get("cpu")), _gib(amounts.get("memory"))
    for field, resource, value in (("cpuCores", "cpu", cores), ("memoryGiB", "memory", memory)):
        if value is None:
            builder.decide(f"spec.accelerator.{field}", "nothing", f"say how much {resource} a replica has")
        else:
            builder.take(f"resources {resource} {amounts[resource]}", f"accelerator.{field}", value)
    if "VLLM_CPU_KVCACHE_SPACE" not in plain_environment(container):
        builder.decide("spec.accelerator.kvCacheGiB", "nothing", "say how many GiB of the memory are KV cache")


def _amounts(container: Mapping[str, Any]) -> dict[str, Any]:
    """Requests, and limits above them."""
    resources = mapping(container, "resources")
    return {**mapping(resources, "requests"), **mapping(resources, "limits")}


def _cores(amount: Any) -> int | None:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(m?)", str(amount))
    return max(1, math.floor(float(match[1]) / (1000 if match[2] else 1))) if match else None


def _gib(amount: Any) -> int | None:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kMGT]?i?)", str(amount))
    if match is None or match[2] not in _UNIT_BYTES:
        return None
    return max(1, math.floor(float(match[1]) * _UNIT_BYTES[match[2]] / 2**30))
