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
from specdecode_operator.cluster.kubeconfig import ClusterView, open_cluster
from specdecode_operator.cluster.nodes import GPU_RESOURCE, NodeFacts, gpus_of, node_facts
from specdecode_operator.cluster.resources import DEPLOYMENT, NODE, POD, Resource
from specdecode_operator.cluster.rights import RELEASE, Scope, rights_in
from specdecode_operator.cluster.storage_classes import is_default
from specdecode_operator.sizing.devices import MEMORY_FIELD, find_device
from specdecode_operator.untrusted import mapping, name_of, objects, texts, whole_number
from specdecode_operator.version import __version__

_Read = TypeVar("_Read")


class Grade(StrEnum):
    """FAIL: no engine will serve like this. WARN: some will not, or it cannot be told."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True)
class Finding:
    """One line of the answer: what was looked at, what was found, and what to do about it."""

    grade: Grade
    subject: str
    what: str
    fix: str = ""


@dataclass(frozen=True)
class Unreadable:
    """Something that could not be read, and why, such as ``you may not list nodes``."""

    why: str


Reading: TypeAlias = _Read | Unreadable
"""What was read of the cluster, or why it was not."""


def ok(subject: str, what: str) -> Finding:
    """Return a finding that asks for nothing."""
    return Finding(Grade.OK, subject, what)


def warn(subject: str, what: str, fix: str) -> Finding:
    """Return a finding with which some engines will not serve."""
    return Finding(Grade.WARN, subject, what, fix)


def fail(subject: str, what: str, fix: str) -> Finding:
    """Return a finding with which no engine will serve."""
    return Finding(Grade.FAIL, subject, what, fix)


def unknown(subject: str, reading: Unreadable) -> Finding:
    """Return a finding for what could not be read."""
    return warn(subject, f"cannot be told: {reading.why}", "run it as somebody who may, or ask them to")


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return the first names, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


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
    lines: list[Finding] = []
    for (product, gpus), count in sorted(Counter((each.product, each.gpus) for each in usable).items()):
        device = find_device(product)
        label = "" if device is None or device.calibrated else ", sized uncalibrated"
        lines.append(ok("gpus", f"{count} node{'s' if count > 1 else ''} with {gpus} x {product}{label}"))
    if not usable:
        lines.append(fail("gpus", "no node has GPUs that can be planned for", "mend one of the nodes below"))
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
    """Return why a node is not planned for, and the fix."""
    if node.refusal is not None:
        return node.refusal, "plans pass it over as it is"
    if find_device(node.product) is None:
        fix = f"name it in spec.accelerator.products and set spec.{MEMORY_FIELD}"
        return f"{node.product} has no memory figures", fix
    return (
        None if node.schedulable else ("is cordoned: nothing new starts there", "kubectl uncordon it when it is well")
    )


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


OLDEST_MINOR: Final = 30
"""preStop sleep and ValidatingAdmissionPolicy are there without a switch from 1.30."""
NEWEST_MINOR: Final = 37
"""The newest that our tests run on (docs/reference/supported.md)."""
_CRD: Final = "crd"
_OPERATOR: Final = "operator"
_ADD_ONS: Final = (
    (
        "leaderworkerset",
        "leaderworkerset.x-k8s.io",
        "for replicas over several nodes",
        "is not installed: needed only for replicas over several nodes",
    ),
    (
        "kueue",
        "kueue.x-k8s.io",
        "for captures and engines in queues",
        "is not installed: needed only for captures and schedules that name a queue",
    ),
    (
        "prometheus",
        "monitoring.coreos.com",
        "metrics.podMonitor.enabled of the chart works",
        "no Prometheus operator: leave metrics.podMonitor.enabled of the chart off",
    ),
)
"""What only some need: subject, API group, what it is for, and what its absence means."""


def version_finding(seen: Reading[str]) -> Finding:
    """Judge the version of the API server."""
    if isinstance(seen, Unreadable):
        return unknown("kubernetes", seen)
    oldest, newest = (f"1.{minor}" for minor in (OLDEST_MINOR, NEWEST_MINOR))
    match = re.match(r"v?1\.(\d+)", seen)
    if match is None:
        return warn("kubernetes", f"{seen}, which is no version that is known", f"use {oldest} to {newest}")
    if int(match[1]) < OLDEST_MINOR:
        fix = f"upgrade: engines drain with preStop sleep, on from {oldest}"
        return fail("kubernetes", f"{seen} is older than {oldest}", fix)
    if int(match[1]) > NEWEST_MINOR:
        what = f"{seen} is newer than {newest}, the newest that this release is tested on"
        return warn("kubernetes", what, "see whether a newer release names it, or try an object of no importance")
    return ok("kubernetes", seen)


def crd_finding(expected: Body, body: Reading[Body | None], groups: Reading[Mapping[str, Sequence[str]]]) -> Finding:
    """Judge one CRD: ``expected`` is that of this command line, ``body`` the installed one.

    If that may not be read, ``groups``, the served versions by API group, say less.
    """
    name = expected["metadata"]["name"]
    if body is None:
        return fail(_CRD, f"{name} is not installed", INSTALL_CRD)
    if isinstance(body, Unreadable):
        if isinstance(groups, Unreadable):
            return unknown(_CRD, body)
        if VERSION not in groups.get(GROUP, ()):
            return fail(_CRD, f"{GROUP}/{VERSION} is not served, nor {name}", INSTALL_CRD)
        what = f"{GROUP}/{VERSION} is served; whether {name} is, and its schema, cannot be told: {body.why}"
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
        fix = f"install CRDs and operator of {__version__} ({INSTALL_CRD}), or use the command line of the operator"
        other = f"{name} serves {VERSION} with another schema than that of this command line"
        return warn(_CRD, crd_skew(body) or other, fix)
    return ok(_CRD, f"{name} serves {names}, as this command line has it")


def operator_finding(deployments: Reading[Sequence[Body]]) -> Finding:
    """Judge whether an operator runs, and its version; of several the first with which something is wrong."""
    if isinstance(deployments, Unreadable):
        return unknown(_OPERATOR, deployments)
    if not deployments:
        fix = "install it: kubectl apply --server-side -k manifests, or the chart specdecode-operator"
        return fail(_OPERATOR, "is not installed", fix)
    for first, second in combinations(deployments, 2):
        served, also = served_namespaces(first), served_namespaces(second)
        if served & also or not (served or also):
            # They would undo each other's work.
            where = f"runs more than once: {_place(first)} and {_place(second)} serve the same namespaces"
            return fail(_OPERATOR, where, "remove one, or have each serve namespaces of its own (watchNamespaces)")
    findings = list(map(_one_operator_finding, deployments))
    return next((each for each in findings if each.grade is not Grade.OK), findings[0])


def _one_operator_finding(body: Body) -> Finding:
    containers = objects(mapping(mapping(mapping(body, "spec"), "template"), "spec"), "containers")
    image, place = str(containers[0].get("image")) if containers else "unknown", _place(body)
    if not mapping(body, "status").get("availableReplicas"):
        namespace, _, name = place.partition("/")
        fix = f"see kubectl describe deployment {name} -n {namespace}, and its pods' logs"
        return fail(_OPERATOR, f"{place} is installed but not available", fix)
    # The tag of the image has the version; if a digest names it, the label has.
    tag = image.rpartition(":")[2].removeprefix("v")
    label = mapping(mapping(body, "metadata"), "labels").get("app.kubernetes.io/version")
    told = (each for each in (tag, label) if isinstance(each, str))
    version = next((each for each in told if re.fullmatch(r"\d+\.\d+\.\d+.*", each)), None)
    if version not in {None, __version__}:
        fix = "use the same version of both: the other one's rules and sizes may differ"
        return warn(_OPERATOR, f"{place} runs {version}, this command line is {__version__}", fix)
    return ok(_OPERATOR, f"{place} is available (image {image})")


def served_namespaces(body: Body) -> frozenset[str]:
    """Return the namespaces that an operator's Deployment names; none if it serves the whole cluster."""
    prefix = "--namespace="
    containers = objects(mapping(mapping(mapping(body, "spec"), "template"), "spec"), "containers")
    arguments = texts(containers[0], "args") if containers else ()
    return frozenset(each.removeprefix(prefix) for each in arguments if each.startswith(prefix))


def rights_finding(account: str, missing: Reading[Sequence[str]]) -> Finding:
    """Judge the rights of the operator's service account."""
    if isinstance(missing, Unreadable):
        return unknown("permissions", missing)
    if missing:
        fix = "grant it: manifests/operator-role.yaml has the whole list"
        return fail("permissions", f"{account} may not {listed(missing, 4)}", fix)
    return ok("permissions", f"{account} may do all that it needs")


def optional_findings(groups: Reading[Mapping[str, Sequence[str]]]) -> list[Finding]:
    """Say what is there that only some need."""
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
    """Judge the namespace's pod security level. Our pods are within restricted, with what podTemplate may not undo."""
    subject = "pod security"
    if isinstance(namespace, Unreadable):
        return unknown(subject, namespace)
    if namespace is None:
        return fail("namespace", f"{name} does not exist", f"kubectl create namespace {name}, or name another with -n")
    level = mapping(mapping(namespace, "metadata"), "labels").get(_ENFORCED, "privileged")
    what = f"namespace {name} enforces {level}"
    if level in {"baseline", "restricted"}:
        what += ", which engine pods are within: but spec.models.volume.hostPath is refused"
    return ok(subject, what)


def quota_findings(quotas: Reading[Sequence[Body]], limits: Reading[Sequence[Body]]) -> list[Finding]:
    """Judge whether a quota leaves room for GPUs, and whether it wants what engine pods do not say."""
    if isinstance(quotas, Unreadable):
        return [unknown("quota", quotas)]
    defaults: set[str] = set()  # What LimitRanges fill in, as quotas call it
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
                what = f"{name} leaves {most} - {taken} {GPU_RESOURCE}"
                numbers = whole_number(most), whole_number(taken)
                is_full = None not in numbers and (numbers[0] or 0) <= (numbers[1] or 0)
                fix = f"raise {resource} of ResourceQuota {name}, or free GPUs in the namespace"
                gpus.append(fail("quota", what, fix) if is_full else ok("quota", what))
        if wanted := [each for each in _MUST_BE_SAID if each in hard and each not in defaults]:
            fix = "set them in spec.podTemplate.spec.containers[engine].resources, or give defaults in a LimitRange"
            wants.append(warn("quota", f"{name} wants every container to say {', '.join(wanted)}", fix))
    return [*gpus, *wants] or [ok("quota", "no ResourceQuota stands in the way")]


def _limits(bodies: Reading[Sequence[Body]]) -> list[Body]:
    bodies = [] if isinstance(bodies, Unreadable) else bodies
    return [each for body in bodies for each in objects(mapping(body, "spec"), "limits")]


def limit_findings(limits: Reading[Sequence[Body]]) -> list[Finding]:
    """Judge default memory limits, which would count against shared memory and the loading of weights."""
    if isinstance(limits, Unreadable):
        return [unknown("limits", limits)]
    found = []
    for body in limits:
        for each in objects(mapping(body, "spec"), "limits"):
            memory = mapping(each, "default").get("memory")
            if each.get("type") == "Container" and memory is not None:
                fix = "set limits.memory of container engine in spec.podTemplate to what the loading of weights takes"
                found.append(warn("limits", f"LimitRange {_name(body)} limits engines to {memory} of memory", fix))
    return found


def shared_memory_finding(limits: Sequence[Finding]) -> Finding:
    """Say where /dev/shm comes from: nothing of the node's is needed."""
    what = "pods bring their own /dev/shm: an emptyDir in memory, 1 GiB for each GPU"
    return ok("shared memory", what + (", which counts against the limit below" if limits else ""))


def storage_findings(classes: Reading[Sequence[Body]]) -> list[Finding]:
    """Judge where claims for models and captures would come from."""
    subject = "storage"
    if isinstance(classes, Unreadable):
        return [unknown(subject, classes)]
    if not classes:
        fix = (
            "install a provisioner, or make the volumes by hand: captures then need spec.storage.persistentVolumeClaim,"
            " and without a claim each pod downloads its models"
        )
        return [warn(subject, "there is no StorageClass", fix)]
    default = [each for each in classes if is_default(each)]
    names = ", ".join(_name(each) for each in classes)
    if not default:
        fix = "name one in each claim and in spec.storage.storageClassName of each capture, or mark one"
        return [warn(subject, f"no StorageClass of {names} is the default", fix)]
    if len(default) > 1:
        marked = ", ".join(_name(each) for each in default)
        return [warn(subject, f"several StorageClasses are the default: {marked}", "leave the mark on one")]
    (chosen,) = default
    mode = chosen.get("volumeBindingMode", "Immediate")
    if mode == "Immediate":
        fix = "use a class with WaitForFirstConsumer where volumes belong to zones or nodes"
        return [warn(subject, f"default {_name(chosen)} binds at once: a volume may be where no GPU is", fix)]
    return [ok(subject, f"default StorageClass {_name(chosen)} ({mode})")]


def claim_finding(claims: Reading[Sequence[Body]]) -> Finding:
    """Say which claims several nodes can share, and which several pods."""
    subject = "claims"
    if isinstance(claims, Unreadable):
        return unknown(subject, claims)
    if not claims:
        return ok(subject, "none in the namespace: models are downloaded by each pod, or put on one and named")
    modes = [(_name(each), texts(mapping(each, "spec"), "accessModes")) for each in claims]
    if exclusive := [name for name, found in modes if found == ["ReadWriteOncePod"]]:
        fix = "for models use ReadWriteMany or ReadOnlyMany, or one object with one replica"
        return warn(subject, f"only one pod at a time can mount {listed(exclusive)}", fix)
    if single := [name for name, found in modes if not _SHARED_MODES & set(found)]:
        fix = (
            "for models that replicas on several nodes share, use ReadWriteMany, or ReadOnlyMany for spec.models.volume"
        )
        return warn(subject, f"only one node at a time can mount {listed(single)}", fix)
    writable = [name for name, found in modes if "ReadWriteMany" in found]
    many = f"all {len(claims)} can be shared by several nodes"
    if not writable:
        return ok(subject, f"{many}, none for spec.models.cache: read-only")
    return ok(subject, f"{many}, {listed(writable)} for spec.models.cache too")


def _name(body: Body) -> str:
    return name_of(mapping(body, "metadata"))


_SOON: Final = timedelta(days=14)
_RENEW: Final = "see the CronJob of the chart (webhook.certificate.from: Job), or cert-manager's Certificate"


def webhook_findings(configurations: Reading[Sequence[Body]], now: datetime) -> list[Finding]:
    """Judge the webhooks of our charts by the certificates that the API server trusts."""
    if isinstance(configurations, Unreadable):
        return [unknown("admission", configurations)]
    found = []
    for configuration in configurations:
        name = mapping(configuration, "metadata").get("name")
        for webhook in objects(configuration, "webhooks"):
            # Without Ignore, an untrusted webhook blocks all objects.
            judged = fail if webhook.get("failurePolicy") != "Ignore" else warn
            then = "objects cannot be stored" if judged is fail else "objects pass unjudged"
            ends = _last_end(mapping(webhook, "clientConfig").get("caBundle"))
            what = f"webhook {name} is trusted until {ends:%Y-%m-%d}" if ends else ""
            if ends is None:
                what = f"the API server trusts no certificate of webhook {name}: {then}"
            elif ends < now:
                what = f"the certificate of webhook {name} has expired on {ends:%Y-%m-%d}: {then}"
            elif ends - now < _SOON:
                judged, what = warn, f"the certificate of webhook {name} expires on {ends:%Y-%m-%d}"
            is_sound = ends is not None and ends - now >= _SOON
            found.append(ok("admission", what) if is_sound else judged("admission", what, _RENEW))
    return found


def _last_end(bundle: object) -> datetime | None:
    from cryptography import x509  # noqa: PLC0415  it takes longer to load than most commands

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
    """Return all findings on a cluster, and on engines in one of its namespaces."""
    # Whoever may not even ask for the version has no cluster, or no login.
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
        *gpu_findings(nodes, pods),
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
    # None there says nothing of the other namespaces.
    return usual if not isinstance(usual, Unreadable) and usual else everywhere


async def _rights(cluster: ClusterView, deployments: Reading[Sequence[Body]]) -> list[Finding]:
    """Judge the rights of each operator's service account."""
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
                attributes["name"] = name if right.names == (RELEASE,) else right.names[0]
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
