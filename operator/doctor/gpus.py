"""Whether there are GPUs that plans can be made for, with a driver that runs the engine."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from specdecode_operator.api.base import Body
from specdecode_operator.doctor.findings import Finding, Reading, Unreadable, fail, listed, ok, unknown, warn
from specdecode_operator.kube.nodes import GPU_RESOURCE, NodeFacts, gpus_of, node_facts
from specdecode_operator.kube.untyped import mapping
from specdecode_operator.sizing.base.devices import MEMORY_FIELD, find_device

ENGINE_CUDA: Final = "13.0"
"""CUDA of the engine: torch 2.14, which vLLM 0.33 asks for, depends on cuda-toolkit 13.0 as 2.13 did (its metadata)."""

_OLDEST_DRIVER: Final = 580
_OLDEST_COMPATIBLE: Final = 525
"""NVIDIA, CUDA compatibility: CUDA 13 wants driver 580; data-centre drivers from 525 can run it with cuda-compat."""

_DRIVER_LABELS: Final = (
    "nvidia.com/cuda.driver-version.full",
    "nvidia.com/cuda.driver-version.major",
    "nvidia.com/cuda.driver.major",
)
"""Newer and older names that GPU-feature-discovery gives it (NVIDIA/k8s-device-plugin, internal/lm/nvml.go)."""

_ENDED: Final = ("Succeeded", "Failed")


def gpu_findings(nodes: Reading[Sequence[Body]], pods: Reading[Sequence[Body]]) -> list[Finding]:
    """Judge the nodes' GPUs by product, what keeps some from being planned for, drivers, and what is free."""
    if isinstance(nodes, Unreadable):
        return [unknown("gpus", nodes)]
    facts = [found for body in nodes if (found := node_facts(body)) is not None]
    if not facts:
        fix = "install NVIDIA's GPU operator, or device plugin and GPU-feature-discovery (type CPU needs neither)"
        return [fail("gpus", f"none of {len(nodes)} nodes offers {GPU_RESOURCE}", fix)]
    usable = [each for each in facts if each.refusal is None and each.schedulable and find_device(each.product)]
    with_gpus = {each.name for each in facts}
    return [
        *_product_findings(usable),
        *_refusal_findings(facts),
        *_driver_findings([body for body in nodes if body["metadata"]["name"] in with_gpus]),
        *([_free_finding(usable, pods)] if usable else []),
    ]


def _product_findings(usable: Sequence[NodeFacts]) -> list[Finding]:
    if not usable:
        return [fail("gpus", "no node has GPUs that can be planned for", "mend one of the nodes below")]
    shapes = Counter((each.product, each.gpus) for each in usable)
    return [
        ok("gpus", f"{count} node{'s' if count > 1 else ''} with {gpus} x {product}{_label(product)}")
        for (product, gpus), count in sorted(shapes.items())
    ]


def _label(product: str) -> str:
    device = find_device(product)
    return "" if device is None or device.calibrated else ", sized uncalibrated"


def _refusal_findings(facts: Iterable[NodeFacts]) -> list[Finding]:
    """One finding for each reason, with the nodes that it holds for."""
    reasons: dict[tuple[str, str], list[str]] = defaultdict(list)
    for each in facts:
        if each.refusal is not None:
            reasons[each.refusal, "plans pass it over as it is"].append(each.name)
        elif find_device(each.product) is None:
            fix = f"name it in spec.accelerator.product and set spec.{MEMORY_FIELD}"
            reasons[f"{each.product} has no memory figures", fix].append(each.name)
        elif not each.schedulable:
            reasons["is cordoned: nothing new starts there", "kubectl uncordon it when it is well"].append(each.name)
    return [warn("gpus", f"{listed(sorted(names))}: {reason}", fix) for (reason, fix), names in sorted(reasons.items())]


def _driver_findings(nodes: Iterable[Body]) -> list[Finding]:
    by_driver: dict[str, list[str]] = defaultdict(list)
    for body in nodes:
        by_driver[_driver(mapping(body["metadata"], "labels"))].append(body["metadata"]["name"])
    return [_driver_finding(driver, names) for driver, names in sorted(by_driver.items())]


def _driver_finding(driver: str, names: Sequence[str]) -> Finding:
    subject, where = "driver", listed(sorted(names))
    match = re.match(r"(\d+)", driver)
    if match is None:
        fix = f"install GPU-feature-discovery, which sets {_DRIVER_LABELS[-1]}; engines want {_OLDEST_DRIVER} or newer"
        return warn(subject, f"{where}: no label tells the driver's version", fix)
    what = f"{where}: {driver}"
    if int(match[1]) >= _OLDEST_DRIVER:
        return ok(subject, f"{what}, enough for CUDA {ENGINE_CUDA}")
    if int(match[1]) >= _OLDEST_COMPATIBLE:
        fix = (
            f"upgrade it to {_OLDEST_DRIVER}; data-centre GPUs may do with VLLM_ENABLE_CUDA_COMPATIBILITY=1 in"
            " spec.engine.env"
        )
        return warn(subject, f"{what} is older than CUDA {ENGINE_CUDA} wants", fix)
    return fail(subject, f"{what} cannot run CUDA {ENGINE_CUDA}", f"upgrade it to {_OLDEST_DRIVER}")


def _driver(labels: Mapping[str, Any]) -> str:
    return next((str(labels[label]) for label in _DRIVER_LABELS if labels.get(label)), "")


def _free_finding(usable: Sequence[NodeFacts], pods: Reading[Sequence[Body]]) -> Finding:
    total = sum(each.gpus for each in usable)
    if isinstance(pods, Unreadable):
        return warn("free gpus", f"of {total}, how many are taken cannot be told: {pods.why}", "ask somebody who may")
    names = {each.name for each in usable}
    running = [pod for pod in pods if mapping(pod, "status").get("phase") not in _ENDED]
    taken = sum(gpus_of(pod) for pod in running if mapping(pod, "spec").get("nodeName") in names)
    if taken >= total:
        return warn("free gpus", f"all {total} are taken", "free some, add a node, or set the priority of the pods")
    return ok("free gpus", f"{total - taken} of {total}")
