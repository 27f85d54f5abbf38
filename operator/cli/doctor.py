"""`specdecode doctor`: check whether a cluster is ready, with the caller's own rights."""

import asyncio
import binascii
import re
from base64 import b64decode
from collections import Counter, defaultdict
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from itertools import combinations
from typing import Annotated, Final, TypeAlias, TypeVar

import typer

from specdecode_operator.api.base import GROUP, VERSION, Body
from specdecode_operator.api.crds import INSTALL_CRD, crd_skew, crds
from specdecode_operator.cli.options import Context, ExitCode, Kubeconfig, Namespace, TextOrJson, ended
from specdecode_operator.cli.outputs import print_json
from specdecode_operator.cli.terminal import say_line
from specdecode_operator.cluster.client import ClusterError, ForbiddenError
from specdecode_operator.cluster.device_slices import read_inventory
from specdecode_operator.cluster.kubeconfig import ClusterView, open_cluster
from specdecode_operator.cluster.nodes import GPU_RESOURCE, NodeFacts, gpus_of, node_facts
from specdecode_operator.cluster.resources import (
    CAPTURE_LABEL,
    DEPLOYMENT,
    NODE,
    POD,
    RESOURCE_SLICE,
    TRAINING_LABEL,
    Resource,
)
from specdecode_operator.cluster.rights import RELEASE, Scope, rights_in
from specdecode_operator.cluster.storage_classes import is_default
from specdecode_operator.sizing.devices import MEMORY_FIELD, find_device
from specdecode_operator.untrusted import mapping, name_of, objects, texts, whole_number
from specdecode_operator.version import __version__

_Read = TypeVar("_Read")


class Grade(StrEnum):
    """FAIL: no engine can serve. WARN: some engines cannot serve, or the check is not possible."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True)
class Finding:
    """Result of one check: its subject, the finding and the fix."""

    grade: Grade
    subject: str
    what: str
    fix: str = ""


@dataclass(frozen=True)
class Unreadable:
    """Something that could not be read, and why, such as ``you may not list nodes``."""

    why: str


Reading: TypeAlias = _Read | Unreadable
"""Data read from the cluster, or the reason why it could not be read."""


def ok(subject: str, what: str) -> Finding:
    """Return a finding without a fix."""
    return Finding(Grade.OK, subject, what)


def warn(subject: str, what: str, fix: str) -> Finding:
    """Return a finding that prevents some engines from serving."""
    return Finding(Grade.WARN, subject, what, fix)


def fail(subject: str, what: str, fix: str) -> Finding:
    """Return a finding that prevents all engines from serving."""
    return Finding(Grade.FAIL, subject, what, fix)


def unknown(subject: str, reading: Unreadable) -> Finding:
    """Return a finding for data that could not be read."""
    return warn(subject, f"cannot check: {reading.why}", "run doctor with an account that has this permission")


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return the first names and the number of further names."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


ENGINE_CUDA: Final = "13.0"
"""CUDA version of the engine. vLLM 0.33 requires torch 2.14, which depends on cuda-toolkit 13.0, as 2.13 did."""
_OLDEST_DRIVER: Final = 580
_OLDEST_COMPATIBLE: Final = 525
"""NVIDIA, CUDA compatibility: CUDA 13 needs driver 580. Data-centre drivers from 525 can run it with cuda-compat."""
_DRIVER_LABELS: Final = (
    "nvidia.com/cuda.driver-version.full",
    "nvidia.com/cuda.driver-version.major",
    "nvidia.com/cuda.driver.major",
)
"""Newer and older labels of GPU-feature-discovery (NVIDIA/k8s-device-plugin, internal/lm/nvml.go)."""
_ENDED: Final = ("Succeeded", "Failed")


def device_findings(slices: Reading[Sequence[Body]]) -> list[Finding]:
    """Report the devices that pods can claim. A cluster without the API has none."""
    devices = () if isinstance(slices, Unreadable) else read_inventory(slices, ()).devices
    counted = Counter(each.product or "a device of unknown memory" for each in devices if each.refusal is None)
    use = "for spec.accelerator.resourceClaim"
    return [ok("devices", f"{count} x {product} {use}") for product, count in sorted(counted.items())]


def gpu_findings(
    nodes: Reading[Sequence[Body]], pods: Reading[Sequence[Body]], *, can_claim: bool = False
) -> list[Finding]:
    """Check the nodes' GPUs: products, unusable nodes, drivers and free GPUs.

    ``can_claim`` is whether pods can claim devices instead of them.
    """
    if isinstance(nodes, Unreadable):
        return [unknown("gpus", nodes)]
    facts = [found for body in nodes if (found := node_facts(body)) is not None]
    if not facts:
        fix = "install NVIDIA's GPU operator, or its device plugin and GPU-feature-discovery; not needed for type CPU"
        what = f"0 of {len(nodes)} nodes offer {GPU_RESOURCE}"
        return [warn("gpus", what, "use spec.accelerator.resourceClaim") if can_claim else fail("gpus", what, fix)]
    usable = [each for each in facts if each.refusal is None and each.schedulable and find_device(each.product)]
    lines: list[Finding] = []
    for (product, gpus), count in sorted(Counter((each.product, each.gpus) for each in usable).items()):
        device = find_device(product)
        label = "" if device is None or device.calibrated else ", sized uncalibrated"
        lines.append(ok("gpus", f"{count} node{'s' if count > 1 else ''} with {gpus} x {product}{label}"))
    if not usable:
        lines.append(fail("gpus", "no node has usable GPUs", "fix one of the nodes below"))
    by_reason: dict[tuple[str, str], list[str]] = defaultdict(list)
    for each in facts:
        if (why := _unusable(each)) is not None:
            by_reason[why].append(each.name)
    for (reason, fix), names in sorted(by_reason.items()):
        lines.append(warn("gpus", f"{listed(sorted(names))}: {reason}", fix))
    with_gpus, by_driver = {each.name for each in facts}, defaultdict(list)
    for body in nodes:
        labels, name = mapping(body["metadata"], "labels"), body["metadata"]["name"]
        if name in with_gpus:
            driver = next((str(labels[label]) for label in _DRIVER_LABELS if labels.get(label)), "")
            by_driver[driver].append(name)
    lines += [_driver_finding(driver, names) for driver, names in sorted(by_driver.items())]
    return [*lines, *([_free_finding(usable, pods)] if usable else [])]


def _unusable(node: NodeFacts) -> tuple[str, str] | None:
    """Return why plans cannot use a node, and the fix; None if they can."""
    if node.refusal is not None:
        return node.refusal, "until this is fixed, plans skip the node"
    if find_device(node.product) is None:
        fix = f"add the product to spec.accelerator.products and set spec.{MEMORY_FIELD}"
        return f"the memory of {node.product} is unknown", fix
    return (
        None
        if node.schedulable
        else ("cordoned: no new pods are scheduled", "run kubectl uncordon when the node is healthy")
    )


def _driver_finding(driver: str, names: Sequence[str]) -> Finding:
    subject, where = "driver", listed(sorted(names))
    match = re.match(r"(\d+)", driver)
    if match is None:
        fix = f"install GPU-feature-discovery, which sets {_DRIVER_LABELS[-1]}; engines need {_OLDEST_DRIVER} or newer"
        return warn(subject, f"{where}: no label with the driver version", fix)
    what = f"{where}: {driver}"
    if int(match[1]) >= _OLDEST_DRIVER:
        return ok(subject, f"{what}, enough for CUDA {ENGINE_CUDA}")
    if int(match[1]) >= _OLDEST_COMPATIBLE:
        fix = (
            f"upgrade it to {_OLDEST_DRIVER}; on data-centre GPUs, VLLM_ENABLE_CUDA_COMPATIBILITY=1 in"
            " spec.engine.env may be enough"
        )
        return warn(subject, f"{what} is too old for CUDA {ENGINE_CUDA}", fix)
    return fail(subject, f"{what} cannot run CUDA {ENGINE_CUDA}", f"upgrade it to {_OLDEST_DRIVER}")


def _free_finding(usable: Sequence[NodeFacts], pods: Reading[Sequence[Body]]) -> Finding:
    total = sum(each.gpus for each in usable)
    if isinstance(pods, Unreadable):
        why = f"cannot count the used ones of {total}: {pods.why}"
        return warn("free gpus", why, "run doctor with an account that has this permission")
    names = {each.name for each in usable}
    running = [pod for pod in pods if mapping(pod, "status").get("phase") not in _ENDED]
    taken = sum(gpus_of(pod) for pod in running if mapping(pod, "spec").get("nodeName") in names)
    if taken >= total:
        return warn("free gpus", f"0 of {total}", "free some, add a node, or set a priority class for the pods")
    return ok("free gpus", f"{total - taken} of {total}")


OLDEST_MINOR: Final = 30
"""preStop sleep and ValidatingAdmissionPolicy are enabled by default from 1.30."""
NEWEST_MINOR: Final = 37
"""Newest version in our tests (docs/reference/supported.md)."""
_CRD: Final = "crd"
_OPERATOR: Final = "operator"
_ADD_ONS: Final = (
    (
        "leaderworkerset",
        "leaderworkerset.x-k8s.io",
        "for replicas over several nodes",
        "not installed: only needed for replicas over several nodes",
    ),
    (
        "gateway api",
        "gateway.networking.k8s.io",
        "for spec.expose.httpRoute",
        "not installed: only needed for spec.expose.httpRoute",
    ),
    (
        "keda",
        "keda.sh",
        "for spec.autoscaling.keda",
        "not installed: only needed for spec.autoscaling.keda",
    ),
    (
        "inference extension",
        "inference.networking.k8s.io",
        "for spec.expose.inferencePool",
        "not installed: only needed for spec.expose.inferencePool",
    ),
    (
        "kueue",
        "kueue.x-k8s.io",
        "for captures and engines in queues",
        "not installed: only needed for captures and schedules with a queue",
    ),
    (
        "prometheus",
        "monitoring.coreos.com",
        "metrics.podMonitor.enabled of the chart works",
        "no Prometheus operator: keep metrics.podMonitor.enabled of the chart off",
    ),
)
"""Optional components: subject, API group, text if installed, and text if not."""


def version_finding(seen: Reading[str]) -> Finding:
    """Check the version of the API server."""
    if isinstance(seen, Unreadable):
        return unknown("kubernetes", seen)
    oldest, newest = (f"1.{minor}" for minor in (OLDEST_MINOR, NEWEST_MINOR))
    match = re.match(r"v?1\.(\d+)", seen)
    if match is None:
        return warn("kubernetes", f"unknown version {seen}", f"use {oldest} to {newest}")
    if int(match[1]) < OLDEST_MINOR:
        fix = f"upgrade: engines drain with preStop sleep, which is enabled from {oldest}"
        return fail("kubernetes", f"{seen} is older than {oldest}", fix)
    if int(match[1]) > NEWEST_MINOR:
        what = f"{seen} is newer than {newest}, the newest version tested with this release"
        return warn("kubernetes", what, "check whether a newer release supports it, or test with an unimportant object")
    return ok("kubernetes", seen)


def crd_finding(expected: Body, body: Reading[Body | None], groups: Reading[Mapping[str, Sequence[str]]]) -> Finding:
    """Compare an installed CRD with the one that this command line includes.

    If the caller may not read CRDs, only the served versions of the API group (``groups``) are checked.
    """
    name = expected["metadata"]["name"]
    if body is None:
        return fail(_CRD, f"{name} is not installed", INSTALL_CRD)
    if isinstance(body, Unreadable):
        if isinstance(groups, Unreadable):
            return unknown(_CRD, body)
        if VERSION not in groups.get(GROUP, ()):
            return fail(_CRD, f"{GROUP}/{VERSION}, the API of {name}, is not served", INSTALL_CRD)
        what = f"{GROUP}/{VERSION} is served; cannot check the schema of {name}: {body.why}"
        return warn(_CRD, what, INSTALL_CRD)
    return _installed_crd_finding(expected, body)


def _installed_crd_finding(expected: Body, body: Body) -> Finding:
    name = expected["metadata"]["name"]
    served = [each for each in objects(mapping(body, "spec"), "versions") if each.get("served")]
    names = ", ".join(str(each.get("name")) for each in served) or "nothing"
    installed = next((each for each in served if each.get("name") == VERSION), None)
    if installed is None:
        return fail(_CRD, f"{name} serves {names}, not {VERSION}", INSTALL_CRD)
    conditions = {each.get("type"): each.get("status") for each in objects(mapping(body, "status"), "conditions")}
    if conditions.get("Established") != "True":
        return fail(_CRD, f"{name} is not established", f"see kubectl describe crd {name}")
    if installed.get("schema") != expected["spec"]["versions"][0]["schema"]:
        fix = f"install CRDs and operator {__version__} ({INSTALL_CRD}), or use the operator's version of specdecode"
        other = f"the schema of {name} {VERSION} differs from the one in this command line"
        return warn(_CRD, crd_skew(body) or other, fix)
    return ok(_CRD, f"{name} serves {names}; the schema matches this command line")


def operator_finding(deployments: Reading[Sequence[Body]]) -> Finding:
    """Check that an operator runs in the right version; of several operators, report the first with a problem."""
    if isinstance(deployments, Unreadable):
        return unknown(_OPERATOR, deployments)
    if not deployments:
        where = '(documentation: "Install the operator")'
        fix = f"install the chart specdecode-operator, with an image that the nodes can pull {where}"
        return fail(_OPERATOR, "is not installed", fix)
    for first, second in combinations(deployments, 2):
        served, also = served_namespaces(first), served_namespaces(second)
        if served & also or not (served or also):
            # They would overwrite each other's changes.
            where = f"{_place(first)} and {_place(second)} serve the same namespaces"
            return fail(_OPERATOR, where, "remove one, or set watchNamespaces so that each serves different namespaces")
    findings = list(map(_one_operator_finding, deployments))
    return next((each for each in findings if each.grade is not Grade.OK), findings[0])


def _one_operator_finding(body: Body) -> Finding:
    containers = objects(mapping(mapping(mapping(body, "spec"), "template"), "spec"), "containers")
    image, place = str(containers[0].get("image")) if containers else "unknown", _place(body)
    if not mapping(body, "status").get("availableReplicas"):
        namespace, _, name = place.partition("/")
        fix = f"see kubectl describe deployment {name} -n {namespace}, and its pods' logs"
        return fail(_OPERATOR, f"{place} is installed but not available", fix)
    # The image tag contains the version. For a digest, use the label.
    tag = image.rpartition(":")[2].removeprefix("v")
    label = mapping(mapping(body, "metadata"), "labels").get("app.kubernetes.io/version")
    told = (each for each in (tag, label) if isinstance(each, str))
    version = next((each for each in told if re.fullmatch(r"\d+\.\d+\.\d+.*", each)), None)
    if version not in {None, __version__}:
        fix = "use the same version of both, because rules and memory estimates may differ"
        return warn(_OPERATOR, f"{place} runs {version}, but this command line is {__version__}", fix)
    return ok(_OPERATOR, f"{place} is available (image {image})")


def served_namespaces(body: Body) -> frozenset[str]:
    """Return the namespaces that an operator is limited to; empty if it serves the whole cluster."""
    prefix = "--namespace="
    containers = objects(mapping(mapping(mapping(body, "spec"), "template"), "spec"), "containers")
    arguments = texts(containers[0], "args") if containers else ()
    return frozenset(each.removeprefix(prefix) for each in arguments if each.startswith(prefix))


def rights_finding(account: str, missing: Reading[Sequence[str]]) -> Finding:
    """Check the permissions of the operator's service account."""
    if isinstance(missing, Unreadable):
        return unknown("permissions", missing)
    if missing:
        fix = "grant them: run helm upgrade, or apply manifests/operator-role.yaml if it serves the whole cluster"
        return fail("permissions", f"{account} may not {listed(missing, 4)}", fix)
    return ok("permissions", f"{account} has all required permissions")


def optional_findings(groups: Reading[Mapping[str, Sequence[str]]]) -> list[Finding]:
    """Report which optional components are installed."""
    if isinstance(groups, Unreadable):
        return [unknown("add-ons", groups)]
    return [
        ok(subject, f"{group} {', '.join(groups[group])}: {use}" if groups.get(group) else absent)
        for subject, group, use, absent in _ADD_ONS
    ]


def _place(body: Body) -> str:
    metadata = mapping(body, "metadata")
    return f"{metadata.get('namespace')}/{metadata.get('name')}"


_ENFORCED: Final = "pod-security.kubernetes.io/enforce"
_MUST_BE_SAID: Final = ("requests.cpu", "cpu", "limits.cpu", "requests.memory", "memory", "limits.memory")
_SHARED_MODES: Final = frozenset({"ReadWriteMany", "ReadOnlyMany"})


def security_finding(name: str, namespace: Reading[Body | None]) -> Finding:
    """Check the namespace's pod security level. Engine pods satisfy restricted, and podTemplate cannot weaken that."""
    subject = "pod security"
    if isinstance(namespace, Unreadable):
        return unknown(subject, namespace)
    if namespace is None:
        return fail(
            "namespace", f"{name} does not exist", f"run kubectl create namespace {name}, or set another with -n"
        )
    level = mapping(mapping(namespace, "metadata"), "labels").get(_ENFORCED, "privileged")
    what = f"namespace {name} enforces {level}"
    if level in {"baseline", "restricted"}:
        what += ", which engine pods satisfy; spec.models.volume.hostPath is rejected"
    return ok(subject, what)


def quota_findings(quotas: Reading[Sequence[Body]], limits: Reading[Sequence[Body]]) -> list[Finding]:
    """Check whether quotas leave GPUs free, and whether they require resources that engine pods do not set."""
    if isinstance(quotas, Unreadable):
        return [unknown("quota", quotas)]
    defaults: set[str] = set()  # Resources that LimitRanges set, by their names in quotas
    for each in _limits(limits):
        limited, requested = mapping(each, "default"), mapping(each, "defaultRequest")
        defaults |= {f"limits.{name}" for name in limited}
        defaults |= {form for name in {*limited, *requested} for form in (name, f"requests.{name}")}
    gpus, wants = [], []
    for quota in quotas:
        hard, used = mapping(mapping(quota, "spec"), "hard"), mapping(mapping(quota, "status"), "used")
        name = _name(quota)
        for resource in (f"requests.{GPU_RESOURCE}", f"limits.{GPU_RESOURCE}"):
            if resource in hard:
                most, taken = str(hard[resource]), str(used.get(resource, "0"))
                what = f"{name}: {taken} of {most} {GPU_RESOURCE} used"
                numbers = whole_number(most), whole_number(taken)
                is_full = None not in numbers and (numbers[0] or 0) <= (numbers[1] or 0)
                fix = f"raise {resource} of ResourceQuota {name}, or free GPUs in the namespace"
                gpus.append(fail("quota", what, fix) if is_full else ok("quota", what))
        if wanted := [each for each in _MUST_BE_SAID if each in hard and each not in defaults]:
            fix = "set them in spec.podTemplate.spec.containers[engine].resources, or as defaults in a LimitRange"
            wants.append(warn("quota", f"{name} requires every container to set {', '.join(wanted)}", fix))
    return [*gpus, *wants] or [ok("quota", "no ResourceQuota limits engine pods")]


def _limits(bodies: Reading[Sequence[Body]]) -> list[Body]:
    bodies = [] if isinstance(bodies, Unreadable) else bodies
    return [each for body in bodies for each in objects(mapping(body, "spec"), "limits")]


def limit_findings(limits: Reading[Sequence[Body]]) -> list[Finding]:
    """Check default memory limits, which also apply to shared memory and to loading weights."""
    if isinstance(limits, Unreadable):
        return [unknown("limits", limits)]
    found = []
    for body in limits:
        for each in objects(mapping(body, "spec"), "limits"):
            memory = mapping(each, "default").get("memory")
            if each.get("type") == "Container" and memory is not None:
                fix = "set limits.memory of container engine in spec.podTemplate high enough to load the weights"
                found.append(warn("limits", f"LimitRange {_name(body)} limits engines to {memory} of memory", fix))
    return found


def shared_memory_finding(limits: Sequence[Finding]) -> Finding:
    """Report the source of /dev/shm, which needs no setup on nodes."""
    what = "pods mount their own /dev/shm: an emptyDir in memory, 1 GiB per GPU"
    return ok("shared memory", what + (", which counts against the limit below" if limits else ""))


def storage_findings(classes: Reading[Sequence[Body]]) -> list[Finding]:
    """Check the StorageClass for claims of models and captures."""
    subject = "storage"
    if isinstance(classes, Unreadable):
        return [unknown(subject, classes)]
    if not classes:
        fix = (
            "install a provisioner, or create volumes manually: captures then need spec.storage.persistentVolumeClaim,"
            " and without a claim each pod downloads its models"
        )
        return [warn(subject, "no StorageClass exists", fix)]
    default = [each for each in classes if is_default(each)]
    names = ", ".join(_name(each) for each in classes)
    if not default:
        fix = "mark one as default, or set it in each claim and in spec.storage.storageClassName of each capture"
        return [warn(subject, f"no default StorageClass among {names}", fix)]
    if len(default) > 1:
        marked = ", ".join(_name(each) for each in default)
        return [warn(subject, f"several StorageClasses are the default: {marked}", "mark only one as default")]
    (chosen,) = default
    mode = chosen.get("volumeBindingMode", "Immediate")
    if mode == "Immediate":
        fix = "if volumes belong to a zone or node, use a class with WaitForFirstConsumer"
        what = f"default {_name(chosen)} binds immediately: a volume may be created where no GPU is"
        return [warn(subject, what, fix)]
    return [ok(subject, f"default StorageClass {_name(chosen)} ({mode})")]


def claim_finding(claims: Reading[Sequence[Body]]) -> Finding:
    """Check which claims several nodes, or several pods, can share; those of captures and trainings hold no models."""
    subject = "claims"
    if isinstance(claims, Unreadable):
        return unknown(subject, claims)
    written = {CAPTURE_LABEL, TRAINING_LABEL}
    claims = [each for each in claims if written.isdisjoint(mapping(mapping(each, "metadata"), "labels"))]
    if not claims:
        return ok(
            subject,
            "none for models in the namespace: each pod downloads its models, unless spec.models refers to a claim",
        )
    modes = [(_name(each), texts(mapping(each, "spec"), "accessModes")) for each in claims]
    if exclusive := [name for name, found in modes if found == ["ReadWriteOncePod"]]:
        fix = "for models, use ReadWriteMany or ReadOnlyMany, or run one object with one replica"
        return warn(subject, f"only one pod at a time can mount {listed(exclusive)}", fix)
    if single := [name for name, found in modes if not _SHARED_MODES & set(found)]:
        fix = (
            "to share models between replicas on several nodes, use ReadWriteMany, or ReadOnlyMany for"
            " spec.models.volume"
        )
        return warn(subject, f"only one node at a time can mount {listed(single)}", fix)
    writable = [name for name, found in modes if "ReadWriteMany" in found]
    many = f"all {len(claims)} can be shared by several nodes"
    if not writable:
        return ok(subject, f"{many}; all are read-only, so spec.models.cache cannot use them")
    return ok(subject, f"{many}; spec.models.cache can use {listed(writable)}")


def _name(body: Body) -> str:
    return name_of(mapping(body, "metadata"))


_SOON: Final = timedelta(days=14)
_RENEW: Final = "see the CronJob of the chart (webhook.certificate.from: Job), or cert-manager's Certificate"


def webhook_findings(configurations: Reading[Sequence[Body]], now: datetime) -> list[Finding]:
    """Check the certificates of our charts' webhooks that the API server trusts."""
    if isinstance(configurations, Unreadable):
        return [unknown("admission", configurations)]
    found = []
    for configuration in configurations:
        name = mapping(configuration, "metadata").get("name")
        for webhook in objects(configuration, "webhooks"):
            # Without Ignore, an untrusted webhook blocks all objects.
            judged = fail if webhook.get("failurePolicy") != "Ignore" else warn
            then = "objects cannot be stored" if judged is fail else "objects are not validated"
            ends = _last_end(mapping(webhook, "clientConfig").get("caBundle"))
            what = f"webhook {name} is trusted until {ends:%Y-%m-%d}" if ends else ""
            if ends is None:
                what = f"the API server trusts no certificate of webhook {name}: {then}"
            elif ends < now:
                what = f"the certificate of webhook {name} expired on {ends:%Y-%m-%d}: {then}"
            elif ends - now < _SOON:
                judged, what = warn, f"the certificate of webhook {name} expires on {ends:%Y-%m-%d}"
            is_sound = ends is not None and ends - now >= _SOON
            found.append(ok("admission", what) if is_sound else judged("admission", what, _RENEW))
    return found


def _last_end(bundle: object) -> datetime | None:
    from cryptography import x509  # noqa: PLC0415  its import takes longer than most commands

    try:
        pem = b64decode(str(bundle or ""), validate=True)
        return max(each.not_valid_after_utc for each in x509.load_pem_x509_certificates(pem))
    except (binascii.Error, ValueError):
        return None


_CRDS: Final = Resource("apiextensions.k8s.io/v1", "CustomResourceDefinition", "customresourcedefinitions")
_NAMESPACE: Final = Resource("v1", "Namespace", "namespaces")
_QUOTA: Final = Resource("v1", "ResourceQuota", "resourcequotas")
_LIMITS: Final = Resource("v1", "LimitRange", "limitranges")
_CLAIM: Final = Resource("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
_CLASS: Final = Resource("storage.k8s.io/v1", "StorageClass", "storageclasses")
_WEBHOOK: Final = Resource(
    "admissionregistration.k8s.io/v1", "ValidatingWebhookConfiguration", "validatingwebhookconfigurations"
)
_REVIEW: Final = Resource("authorization.k8s.io/v1", "SubjectAccessReview", "subjectaccessreviews")
_OPERATOR_LABEL: Final = "app.kubernetes.io/name=specdecode-operator"
_CHART_LABEL: Final = "app.kubernetes.io/part-of=specdecode"
_USUAL_NAMESPACE: Final = "specdecode-system"


async def examine(cluster: ClusterView, namespace: str) -> list[Finding]:
    """Return all findings about a cluster, and about engines in one namespace."""
    # If this fails, the cluster or the login does not work at all.
    version = await cluster.version()
    expected = crds()
    groups, deployments, webhooks, nodes, pods, classes = await asyncio.gather(
        _read(cluster.groups()),
        _operators(cluster),
        _read(cluster.list(_WEBHOOK, selector=_CHART_LABEL)),
        _read(cluster.list(NODE)),
        _read(cluster.list(POD)),
        _read(cluster.list(_CLASS)),
    )
    devices = device_findings(await _read(cluster.list(RESOURCE_SLICE)))
    installed = await asyncio.gather(*(_read(cluster.get(_CRDS, None, each["metadata"]["name"])) for each in expected))
    space, quotas, limits, claims = await asyncio.gather(
        _read(cluster.get(_NAMESPACE, None, namespace)),
        _read(cluster.list(_QUOTA, namespace)),
        _read(cluster.list(_LIMITS, namespace)),
        _read(cluster.list(_CLAIM, namespace)),
    )
    limited = limit_findings(limits)
    return [
        version_finding(version),
        *(crd_finding(each, body, groups) for each, body in zip(expected, installed, strict=True)),
        operator_finding(deployments),
        *await _rights(cluster, deployments),
        *webhook_findings(webhooks, datetime.now(UTC)),
        *gpu_findings(nodes, pods, can_claim=bool(devices)),
        *devices,
        shared_memory_finding(limited),
        *limited,
        *storage_findings(classes),
        claim_finding(claims),
        security_finding(namespace, space),
        *quota_findings(quotas, limits),
        *optional_findings(groups),
    ]


async def _read(question: Awaitable[_Read]) -> Reading[_Read]:
    try:
        return await question
    except ForbiddenError as error:
        return Unreadable(str(error).partition(":")[0])
    except ClusterError as error:
        return Unreadable(str(error))


async def _operators(cluster: ClusterView) -> Reading[list[Body]]:
    everywhere = await _read(cluster.list(DEPLOYMENT, selector=_OPERATOR_LABEL))
    if not isinstance(everywhere, Unreadable):
        return everywhere
    usual = await _read(cluster.list(DEPLOYMENT, _USUAL_NAMESPACE, _OPERATOR_LABEL))
    # If this namespace has no operator, others still may.
    return usual if not isinstance(usual, Unreadable) and usual else everywhere


async def _rights(cluster: ClusterView, deployments: Reading[Sequence[Body]]) -> list[Finding]:
    """Check the permissions of each operator's service account."""
    findings = []
    for body in [] if isinstance(deployments, Unreadable) else deployments:
        own, name = (str(mapping(body, "metadata").get(key)) for key in ("namespace", "name"))
        pod = mapping(mapping(mapping(body, "spec"), "template"), "spec")
        account = pod.get("serviceAccountName", "default")
        served = sorted(served_namespaces(body))
        places = [(scope, each) for each in served for scope in (Scope.SERVED, Scope.NAMED)]
        places = places or [(Scope.SERVED, ""), (Scope.CLUSTER, "")]
        rights = [(right, space) for scope, space in [*places, (Scope.OWN, own)] for right in rights_in(scope)]
        asked = [(right, verb, space) for right, space in rights for verb in right.verbs]
        reviews = []
        for right, verb, space in asked:
            qualified, _, subresource = right.resource.partition("/")
            plural, _, group = qualified.partition(".")
            attributes = {"verb": verb, "group": group, "resource": plural, "subresource": subresource}
            attributes["namespace"] = space
            if right.names:
                attributes["name"] = right.names[0].replace(RELEASE, name)
            spec = {
                "user": f"system:serviceaccount:{own}:{account}",
                "groups": ["system:serviceaccounts", f"system:serviceaccounts:{own}", "system:authenticated"],
                "resourceAttributes": attributes,
            }
            review = {"apiVersion": _REVIEW.api_version, "kind": _REVIEW.kind, "spec": spec}
            reviews.append(cluster.review(_REVIEW, review))
        missing: Reading[list[str]]
        answers = await _read(asyncio.gather(*reviews))
        if isinstance(answers, Unreadable):
            missing = answers
        else:
            missing = [
                f"{verb} {right.resource}" + (f" in namespace {space}" if space else "")
                for (right, verb, space), answer in zip(asked, answers, strict=True)
                if not mapping(answer, "status").get("allowed")
            ]
        findings.append(rights_finding(f"service account {own}/{account}", missing))
    return findings


def doctor_command(
    *,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    output: Annotated[TextOrJson, typer.Option("--output", "-o", help="Format: text or json.")] = TextOrJson.TEXT,
) -> None:
    """Check whether a cluster is ready for engines, and print OK, WARN or FAIL with the fix.

    It only reads, with your own permissions. A check that you have no permission
    for is reported as WARN.

    For example: specdecode doctor -n models

    Exits with 0 when no check is FAIL, 4 when one is, 2 when the cluster cannot
    be reached.
    """

    async def found() -> list[Finding]:
        async with open_cluster(context, kubeconfig) as cluster:
            return await examine(cluster, namespace or cluster.namespace)

    with ended(ClusterError):
        findings = asyncio.run(found())
    if output is TextOrJson.JSON:
        print_json({"findings": [asdict(finding) for finding in findings]})
    else:
        width = max(len(finding.subject) for finding in findings)
        for each in findings:
            fix = f" -> {each.fix}" if each.fix else ""
            say_line(f"{each.grade:<4}  {each.subject:<{width}}  {each.what}{fix}")
    failed = any(finding.grade is Grade.FAIL for finding in findings)
    raise typer.Exit(ExitCode.DOES_NOT_FIT if failed else ExitCode.OK)
