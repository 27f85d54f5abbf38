"""Claim GPUs through Dynamic Resource Allocation: devices for the plan, requests of pods, and ResourceClaimTemplates.

The spec of a ResourceClaimTemplate is immutable, so its name has a hash of the request. Pods carry the request in an
annotation, from which the operator also renders the template of an earlier workload that it keeps or restores.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from specdecode_operator.api.base import Body
from specdecode_operator.api.crd_validation import UnsupportedCelError, syntax_error
from specdecode_operator.api.deployment import Key, SpecDecodeDeploymentSpec
from specdecode_operator.cluster.device_slices import Device, DeviceInventory, Selector
from specdecode_operator.cluster.drift import content_hash
from specdecode_operator.cluster.manifests import owned
from specdecode_operator.cluster.nodes import NodeFacts
from specdecode_operator.cluster.resources import RESOURCE_CLAIM_ANNOTATION, RESOURCE_CLAIM_TEMPLATE
from specdecode_operator.deployment.conditions import Blocked
from specdecode_operator.deployment.pod_template_merge import CLAIM
from specdecode_operator.deployment.rollout.engine_workload import WORKLOAD_KINDS, pod_templates
from specdecode_operator.enums import AcceleratorType
from specdecode_operator.problems import InvalidSpecError, Problem, shown
from specdecode_operator.sizing.devices import UNNAMED_GPU, MeasuredProduct, measured_product
from specdecode_operator.sizing.placement import Row
from specdecode_operator.untrusted import mapping, parse_json

FIELD: Final = "spec.accelerator.resourceClaim"
NO_DEVICES: Final = "NoMatchingDevices"
API_MISSING: Final = Blocked(
    "ResourceClaimsMissing",
    f"{FIELD}: the cluster has no ResourceClaimTemplates (resource.k8s.io/v1), or the operator may not list them: use"
    " Kubernetes 1.34 or newer, update the operator's role, or remove resourceClaim to use nvidia.com/gpu of the device"
    " plugin",
)
_NO_DEVICE: Final = "no ResourceSlice has a device: check the DRA driver"
_SHOWN: Final = 4
_SHOWN_TEXT: Final = 128
_MOST_ANSWERS: Final = 64
_MOST_WORK: Final = 20_000_000
"""Cost of all selectors of a spec on all devices, above which they are left to the scheduler: some seconds."""


def claims_devices(spec: SpecDecodeDeploymentSpec) -> bool:
    """Return whether the pods of a spec claim their GPUs."""
    return spec.accelerator.type is AcceleratorType.GPU and spec.accelerator.resource_claim is not None


def usable_gpus(
    spec: SpecDecodeDeploymentSpec, nodes: tuple[NodeFacts, ...], inventory: DeviceInventory | None
) -> tuple[NodeFacts, ...]:
    """Return the GPUs to plan for: those that a spec may claim, or else those of the nodes."""
    return nodes if inventory is None or not claims_devices(spec) else claimable_gpus(spec, inventory).nodes


@dataclass(frozen=True)
class ClaimableGpus:
    """GPUs that a spec may claim, as nodes with GPUs."""

    nodes: tuple[NodeFacts, ...]
    blocked: Blocked  # Reported if no GPU matches and the spec has no products and perNode


def claimable_gpus(spec: SpecDecodeDeploymentSpec, inventory: DeviceInventory) -> ClaimableGpus:
    """Return the GPUs that the claim of a spec matches."""
    claim = spec.accelerator.resource_claim
    assert claim is not None  # noqa: S101  checked by the caller
    asked = (claim.device_class_name, tuple(claim.selectors), tuple(spec.accelerator.products))
    # Not a cache of this module, which would keep the devices of earlier slices.
    memo: dict[Any, ClaimableGpus] = inventory.memo
    if asked not in memo:
        if len(memo) >= _MOST_ANSWERS:
            memo.clear()
        memo[asked] = _claimable(*asked, inventory)
    return memo[asked]


def _claimable(
    class_name: str, texts: tuple[str, ...], products: tuple[str, ...], inventory: DeviceInventory
) -> ClaimableGpus:
    if not inventory.is_known:
        message = (
            f"{FIELD}: the operator has not read ResourceSlices and DeviceClasses yet, or may not list them: set"
            " spec.accelerator.products and perNode, or update the operator's role"
        )
        return ClaimableGpus((), Blocked(NO_DEVICES, message))
    if class_name not in inventory.classes:
        known = ", ".join(sorted(inventory.classes)[:_SHOWN])
        fix = f"use one of {known}, or install" if known else "the cluster has none: install"
        message = f"{FIELD}.deviceClassName: {class_name}: DeviceClass not found: {fix} the DRA driver that creates it"
        return ClaimableGpus((), Blocked("DeviceClassNotFound", message))
    own = [Selector(f"selectors[{number}] ({shown(text, _SHOWN_TEXT)})", text) for number, text in enumerate(texts)]
    if sum(each.cost for each in own) * len(inventory.devices) > _MOST_WORK:
        own = [replace(each, is_too_costly=True) for each in own]
    selectors = [*inventory.classes[class_name], *own]
    matching: dict[tuple[str, str], list[Device]] = defaultdict(list)
    reasons: Counter[str] = Counter()
    for device in inventory.devices:
        why = device.refusal or _mismatch(device, selectors, products)
        if why is None:
            matching[device.node, device.product].append(device)
        else:
            reasons[why] += 1
    nodes = tuple(
        NodeFacts(node, product, _usable(devices, inventory)) for (node, product), devices in sorted(matching.items())
    )
    found = "; ".join(f"{count} x {why}" for why, count in reasons.most_common(_SHOWN))
    counted = Counter(device.product or "unnamed" for device in inventory.devices)
    present = ", ".join(f"{count} x {product}" for product, count in counted.most_common(_SHOWN))
    if products and nodes:
        found = f"none is {' or '.join(products[:_SHOWN])} (spec.accelerator.products)"
    what = f"none of the devices ({present}) matches: {found}: change the claim" if present else _NO_DEVICE
    message = (
        f"{FIELD}: {what}, or add nodes; for node pools that scale from zero, set spec.accelerator.products and perNode"
    )
    return ClaimableGpus(nodes, Blocked(NO_DEVICES, message))


def _usable(devices: list[Device], inventory: DeviceInventory) -> int:
    # Processes of one engine cannot use several MIG devices together: NCCL does not support it.
    return min(1, len(devices)) if devices[0].is_slice else inventory.at_once(devices)


def _mismatch(device: Device, selectors: Iterable[Selector], products: Collection[str]) -> str | None:
    for selector in selectors:
        try:
            why = selector.mismatch(device)
        except UnsupportedCelError:
            # The API server and the scheduler know more functions. The claim pins the product in any case.
            if device.product not in products:
                return f"{selector.place} can be evaluated only by the scheduler, so set spec.accelerator.products"
        else:
            if why is not None:
                return why
    return None


def selector_problems(spec: SpecDecodeDeploymentSpec) -> Iterator[Problem]:
    """Yield selectors that are not CEL, which the API server would reject in the ResourceClaimTemplate."""
    claim = spec.accelerator.resource_claim
    for number, text in enumerate(claim.selectors if claim else []):
        if error := syntax_error(text):
            message = f"is not a CEL expression: {error}; write one such as device.driver == 'gpu.nvidia.com'"
            yield Problem(f"{FIELD}.selectors[{number}]", shown(text, _SHOWN_TEXT), message)


def check_count(spec: SpecDecodeDeploymentSpec, chosen: Row) -> None:
    """Raise InvalidSpecError if the given number of devices is not the number of GPUs of a pod."""
    claim = spec.accelerator.resource_claim
    if claim is not None and claim.count not in (None, chosen.gpus_per_node):
        number = chosen.gpus_per_node
        message = f"the plan uses {chosen.place}, {number} GPUs per pod: remove it, or set it to {number}"
        raise InvalidSpecError([Problem(f"{FIELD}.count", str(claim.count), message)])


def claim_request(spec: SpecDecodeDeploymentSpec, chosen: Row) -> str:
    """Return the request for the GPUs of a pod as JSON: class, count, and selectors including one for the product."""
    claim = spec.accelerator.resource_claim
    assert claim is not None  # noqa: S101  checked by the caller
    request = {
        "deviceClassName": claim.device_class_name,
        "count": chosen.gpus_per_node,
        "selectors": [*claim.selectors, _product_selector(chosen.product)],
    }
    return json.dumps(request, sort_keys=True)


def _product_selector(product: str) -> str:
    """Return the CEL expression that is true for devices of a planned product only.

    Without ``has`` and plain field selection, the API server cannot bound the cost, and rejects the expression.
    """
    attributes, memory = "device.attributes[device.driver]", "device.capacity[device.driver].memory"
    measured = measured_product(product) or MeasuredProduct(product, 0)
    terms = [_attribute_is(f"{attributes}.productName", " ", "-", measured.product)]
    if measured.product == UNNAMED_GPU:
        low, high = (f"quantity('{mebibytes}Mi')" for mebibytes in (measured.memory_mib, measured.memory_mib + 1))
        terms = [f"has({memory})", f"{memory}.compareTo({low}) >= 0", f"{memory}.compareTo({high}) < 0"]
    if measured.profile is None:
        return " && ".join([*terms, f"!has({attributes}.profile)"])
    return " && ".join([*terms, _attribute_is(f"{attributes}.profile", "+", ".", measured.profile)])


def _attribute_is(attribute: str, character: str, by: str, value: str) -> str:
    return f"has({attribute}) && {attribute}.replace('{character}', '{by}') == '{value}'"


def pod_claims(key: Key, request: str) -> list[Body]:
    """Return `resourceClaims` of a pod."""
    return [{"name": CLAIM, "resourceClaimTemplateName": template_name(key, request)}]


def template_name(key: Key, request: str) -> str:
    """Return the name of the ResourceClaimTemplate with a request."""
    return f"{key.name}-gpus-{content_hash(request)[:6]}"


def requested(metadata: Mapping[str, Any]) -> str | None:
    """Return the request in the annotation of a pod or a pod template."""
    text = mapping(metadata, "annotations").get(RESOURCE_CLAIM_ANNOTATION)
    return text if isinstance(text, str) else None


def claim_templates(key: Key, uid: str, workloads: Iterable[Body]) -> list[Body]:
    """Return the ResourceClaimTemplates of the pods that these workloads start."""
    pods = (pod for each in workloads if each["kind"] in WORKLOAD_KINDS for pod in pod_templates(each))
    requests = filter(None, (requested(mapping(pod, "metadata")) for pod in pods))
    return [_template(key, uid, request) for request in dict.fromkeys(requests)]


def _template(key: Key, uid: str, request: str) -> Body:
    given = parse_json(request)
    exactly = {
        "deviceClassName": given["deviceClassName"],
        "count": given["count"],
        "selectors": [{"cel": {"expression": text}} for text in given["selectors"]],
    }
    body = {
        "apiVersion": RESOURCE_CLAIM_TEMPLATE.api_version,
        "kind": RESOURCE_CLAIM_TEMPLATE.kind,
        "metadata": {"name": template_name(key, request)},
        "spec": {"spec": {"devices": {"requests": [{"name": CLAIM, "exactly": exactly}]}}},
    }
    return owned(body, key, uid)
