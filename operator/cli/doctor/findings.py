"""Judge the state of a cluster and of a namespace.

Cluster findings cover API server, CRD, operator, webhook and GPUs; namespace findings cover limits and storage.
"""

import binascii
import re
from base64 import b64decode
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import combinations
from typing import Any, Final, TypeAlias, TypeVar

from specdecode_operator.api.base import GROUP, VERSION, Body
from specdecode_operator.api.crds import INSTALL_CRD, crd_skew
from specdecode_operator.cluster.nodes import GPU_RESOURCE, NodeFacts, gpus_of, node_facts
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


OLDEST_MINOR: Final = 30
"""preStop sleep and ValidatingAdmissionPolicy are there without a switch from 1.30."""

NEWEST_MINOR: Final = 37
"""The newest that our tests run on (docs/reference/supported.md)."""

_CRD: Final = "crd"
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

    Where that may not be read, ``groups``, the versions that are served by
    group, say less.
    """
    name = expected["metadata"]["name"]
    if body is None:
        return fail(_CRD, f"{name} is not installed", INSTALL_CRD)
    if not isinstance(body, Unreadable):
        return _installed_crd_finding(expected, body)
    if isinstance(groups, Unreadable):
        return unknown(_CRD, body)
    if VERSION in groups.get(GROUP, ()):
        what = f"{GROUP}/{VERSION} is served; whether {name} is, and its schema, cannot be told: {body.why}"
        return warn(_CRD, what, INSTALL_CRD)
    return fail(_CRD, f"{GROUP}/{VERSION} is not served, nor {name}", INSTALL_CRD)


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
    subject = "operator"
    if isinstance(deployments, Unreadable):
        return unknown(subject, deployments)
    if not deployments:
        fix = "install it: kubectl apply --server-side -k manifests, or the chart specdecode-operator"
        return fail(subject, "is not installed", fix)
    if both := _meeting(deployments):
        where = f"runs more than once: {_place(both[0])} and {_place(both[1])} serve the same namespaces"
        return fail(subject, where, "remove one, or have each serve namespaces of its own (watchNamespaces)")
    findings = [_one_operator_finding(each) for each in deployments]
    return next((each for each in findings if each.grade is not Grade.OK), findings[0])


def served_namespaces(body: Body) -> frozenset[str]:
    """Return the namespaces that an operator's Deployment names; none where it serves the whole cluster."""
    prefix = "--namespace="
    return frozenset(argument.removeprefix(prefix) for argument in _arguments(body) if argument.startswith(prefix))


def _arguments(body: Body) -> Sequence[str]:
    containers = objects(mapping(mapping(mapping(body, "spec"), "template"), "spec"), "containers")
    return texts(containers[0], "args") if containers else ()


def _meeting(deployments: Sequence[Body]) -> tuple[Body, Body] | None:
    """Return two operators that would undo each other's work."""
    for first, second in combinations(deployments, 2):
        served, also = served_namespaces(first), served_namespaces(second)
        if served & also or not (served or also):
            return first, second
    return None


def _one_operator_finding(body: Body) -> Finding:
    subject = "operator"
    containers = objects(mapping(mapping(mapping(body, "spec"), "template"), "spec"), "containers")
    image = str(containers[0].get("image")) if containers else "unknown"
    if not mapping(body, "status").get("availableReplicas"):
        namespace, _, name = _place(body).partition("/")
        fix = f"see kubectl describe deployment {name} -n {namespace}, and its pods' logs"
        return fail(subject, f"{_place(body)} is installed but not available", fix)
    version = _version(body, image)
    if version not in {None, __version__}:
        fix = "use the same version of both: the other one's rules and sizes may differ"
        return warn(subject, f"{_place(body)} runs {version}, this command line is {__version__}", fix)
    return ok(subject, f"{_place(body)} is available (image {image})")


def _version(body: Body, image: str) -> str | None:
    """Return an operator's version: by the tag of its image, else, as where a digest names it, by the label."""
    tag = image.rpartition(":")[2].removeprefix("v")
    label = mapping(mapping(body, "metadata"), "labels").get("app.kubernetes.io/version")
    told = (each for each in (tag, label) if isinstance(each, str))
    return next((each for each in told if re.fullmatch(r"\d+\.\d+\.\d+.*", each)), None)


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
_GPU_QUOTAS: Final = (f"requests.{GPU_RESOURCE}", f"limits.{GPU_RESOURCE}")
_MUST_BE_SAID: Final = ("requests.cpu", "cpu", "limits.cpu", "requests.memory", "memory", "limits.memory")
_ONE_POD_MODE: Final = ["ReadWriteOncePod"]
_WRITABLE_MODE: Final = "ReadWriteMany"
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
    defaults = set() if isinstance(limits, Unreadable) else _defaults(limits)
    found = [_gpu_quota(quota, resource) for quota in quotas for resource in _GPU_QUOTAS if resource in _hard(quota)]
    for quota in quotas:
        wanted = [each for each in _MUST_BE_SAID if each in _hard(quota) and each not in defaults]
        if wanted:
            fix = "set them in spec.podTemplate.spec.containers[engine].resources, or give defaults in a LimitRange"
            found.append(warn("quota", f"{_name(quota)} wants every container to say {', '.join(wanted)}", fix))
    return found or [ok("quota", "no ResourceQuota stands in the way")]


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
            "install a provisioner, or make the volumes by hand: captures then need spec.storage.existingClaim, and"
            " without a claim each pod downloads its models"
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
    exclusive = [each for each in claims if _modes(each) == _ONE_POD_MODE]
    if exclusive:
        fix = "for models use ReadWriteMany or ReadOnlyMany, or one object with one replica"
        return warn(subject, f"only one pod at a time can mount {_names(exclusive)}", fix)
    single = [each for each in claims if not _SHARED_MODES & set(_modes(each))]
    if single:
        fix = (
            "for models that replicas on several nodes share, use ReadWriteMany, or ReadOnlyMany for spec.models.volume"
        )
        return warn(subject, f"only one node at a time can mount {_names(single)}", fix)
    writable = [each for each in claims if _WRITABLE_MODE in _modes(each)]
    if not writable:
        return ok(subject, f"all {len(claims)} can be shared by several nodes, none for spec.models.cache: read-only")
    return ok(
        subject, f"all {len(claims)} can be shared by several nodes, {_names(writable)} for spec.models.cache too"
    )


def _modes(claim: Body) -> list[str]:
    return [str(mode) for mode in mapping(claim, "spec").get("accessModes") or []]


def _gpu_quota(quota: Body, resource: str) -> Finding:
    hard, used = str(_hard(quota)[resource]), str(mapping(mapping(quota, "status"), "used").get(resource, "0"))
    what = f"{_name(quota)} leaves {hard} - {used} {GPU_RESOURCE}"
    most, taken = whole_number(hard), whole_number(used)
    if most is not None and taken is not None and most <= taken:
        return fail("quota", what, f"raise {resource} of ResourceQuota {_name(quota)}, or free GPUs in the namespace")
    return ok("quota", what)


def _defaults(limits: Sequence[Body]) -> set[str]:
    found: set[str] = set()
    for body in limits:
        for each in objects(mapping(body, "spec"), "limits"):
            limited, requested = mapping(each, "default"), mapping(each, "defaultRequest")
            found |= {f"limits.{name}" for name in limited}
            found |= {form for name in {*limited, *requested} for form in (name, f"requests.{name}")}
    return found


def _hard(quota: Body) -> Mapping[str, Any]:
    return mapping(mapping(quota, "spec"), "hard")


def _name(body: Body) -> str:
    return name_of(mapping(body, "metadata"))


def _names(bodies: Sequence[Body]) -> str:
    return listed([_name(each) for each in bodies])


_SUBJECT: Final = "admission"
_SOON: Final = timedelta(days=14)
_RENEW: Final = "see the CronJob of the chart (webhook.certificate.from: Job), or cert-manager's Certificate"


def webhook_findings(configurations: Reading[Sequence[Body]], now: datetime) -> list[Finding]:
    """Judge the webhooks of our charts, by the certificates that the API server trusts; none where there are none."""
    if isinstance(configurations, Unreadable):
        return [unknown(_SUBJECT, configurations)]
    return [finding for each in configurations for finding in _findings(each, now)]


def _findings(configuration: Body, now: datetime) -> Iterator[Finding]:
    name = mapping(configuration, "metadata").get("name")
    for webhook in objects(configuration, "webhooks"):
        # Of what is refused then nothing else gets in.
        judged = fail if webhook.get("failurePolicy") != "Ignore" else warn
        then = "objects cannot be stored" if judged is fail else "objects pass unjudged"
        ends = _last_end(mapping(webhook, "clientConfig").get("caBundle"))
        if ends is None:
            yield judged(_SUBJECT, f"the API server trusts no certificate of webhook {name}: {then}", _RENEW)
        elif ends < now:
            yield judged(_SUBJECT, f"the certificate of webhook {name} has expired on {ends:%Y-%m-%d}: {then}", _RENEW)
        elif ends - now < _SOON:
            yield warn(_SUBJECT, f"the certificate of webhook {name} expires on {ends:%Y-%m-%d}", _RENEW)
        else:
            yield ok(_SUBJECT, f"webhook {name} is trusted until {ends:%Y-%m-%d}")


def _last_end(bundle: object) -> datetime | None:
    from cryptography import x509  # noqa: PLC0415  it takes longer to load than most commands

    try:
        pem = b64decode(str(bundle or ""), validate=True)
        return max(each.not_valid_after_utc for each in x509.load_pem_x509_certificates(pem))
    except (binascii.Error, ValueError):
        return None
