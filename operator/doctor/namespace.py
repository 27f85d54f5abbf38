"""Whether engine pods would be let into a namespace: pod security, quota, limits, storage for models and captures."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from specdecode_operator.api.base import Body
from specdecode_operator.doctor.findings import Finding, Reading, Unreadable, fail, listed, ok, unknown, warn
from specdecode_operator.documents.numbers import whole_number
from specdecode_operator.kube.nodes import GPU_RESOURCE
from specdecode_operator.kube.storage_classes import is_default
from specdecode_operator.kube.untyped import mapping, name_of, objects

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
    """What LimitRanges fill in, as quotas call it."""
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
