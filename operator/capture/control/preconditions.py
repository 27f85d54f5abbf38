"""What must be in place before a capture borrows its deployment's GPUs: volumes that its pod can mount.

Secrets are not looked at, because the operator may not read them. What cannot be looked at is left to
``spec.borrowTimeoutSeconds``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import SpecDecodeCaptureSpec
from specdecode_operator.capture.control.admission import dataset_claim
from specdecode_operator.capture.control.capture import Capture
from specdecode_operator.capture.control.observation import MountedObjects
from specdecode_operator.capture.control.volume import claim_of
from specdecode_operator.deployment.blocked import Blocked
from specdecode_operator.kube.storage_classes import StorageClasses
from specdecode_operator.kube.untyped import mapping, objects

_GOES_ON = "the deployment serves meanwhile, and the capture goes on when that has changed"


@dataclass(frozen=True)
class MountedNames:
    """Names of what a pod mounts and cannot start without."""

    claims: Sequence[str] = ()
    config_maps: Sequence[str] = ()


def mounted_names(pod_spec: Body) -> MountedNames:
    """Return what a pod mounts, by its spec."""
    volumes = objects(pod_spec, "volumes")
    claims = [mapping(each, "persistentVolumeClaim").get("claimName") for each in volumes]
    config_maps = [mapping(each, "configMap") for each in volumes]
    return MountedNames(
        sorted({str(each) for each in claims if each}),
        sorted({str(each["name"]) for each in config_maps if each.get("name") and not each.get("optional")}),
    )


def class_blocked(spec: SpecDecodeCaptureSpec, mounted: MountedObjects) -> Blocked | None:
    """Return that the claim to be created would find no volume."""
    missing = None if mounted.classes is None else mounted.classes.missing(spec.storage.storage_class_name)
    if missing is None:
        return None
    fix = "create it, or correct the name in another capture"
    if spec.storage.storage_class_name is None:
        fix = "name one in another capture, or mark one as the default"
    message = (
        f"spec.storage.storageClassName: {spec.storage.storage_class_name or 'not set'}: {missing}: {fix}; for a"
        f" volume that was made by hand, name its claim in spec.storage.existingClaim; {_GOES_ON}"
    )
    return Blocked("StorageClassNotFound", message)


def waits_for_binding(spec: SpecDecodeCaptureSpec, mounted: MountedObjects) -> Blocked | None:
    """Return that a claim that is just created has to be bound before the GPUs are borrowed."""
    name = spec.storage.storage_class_name
    if mounted.classes is None or not mounted.classes.binds_at_once(name):
        return None
    which = f"StorageClass {name}" if name else "the default StorageClass"
    message = f"spec.storage: the claim was created, and {which} binds it at once; goes on when it is bound"
    return Blocked("ClaimNotBound", message)


def mounts_blocked(capture: Capture, spec: SpecDecodeCaptureSpec, mounted: MountedObjects) -> Blocked | None:
    """Return what of the objects that the capture's pod mounts would keep it from starting."""
    return next(_blocked_mounts(capture, spec, mounted), None)


def _blocked_mounts(capture: Capture, spec: SpecDecodeCaptureSpec, mounted: MountedObjects) -> Iterator[Blocked]:
    own = claim_of(capture, spec.storage)
    fields = {
        own: f"spec.storage.{'existingClaim' if spec.storage.existing_claim else 'storageClassName'}",
        dataset_claim(spec): "spec.workload.prompts.dataset.persistentVolumeClaim.claimName",
    }
    for name, claim in mounted.claims.items():
        where = f"{fields.get(name, 'a volume of its deployment')}: claim {name}"
        if claim is None:
            yield Blocked("ClaimNotFound", f"{where} does not exist: create it; {_GOES_ON}")
        elif "deletionTimestamp" in claim["metadata"]:
            yield Blocked("ClaimIsLeaving", f"{where} is being deleted: create it again; {_GOES_ON}")
        elif blocked := _unbound(where, claim, mounted.classes):
            yield blocked
    for name, config_map in mounted.config_maps.items():
        if config_map is None:
            message = f"ConfigMap {name}, which its pod mounts, does not exist: create it; {_GOES_ON}"
            yield Blocked("DatasetNotFound", message)


def _unbound(where: str, claim: Body, classes: StorageClasses | None) -> Blocked | None:
    """Return why no pod can use a claim yet; None for one that is bound, or that its first pod binds."""
    phase = mapping(claim, "status").get("phase")
    if phase == "Bound":
        return None
    if phase == "Lost":
        return Blocked("ClaimLost", f"{where} has lost its volume: delete it, or name another one; {_GOES_ON}")
    if classes is None:
        return None
    name = mapping(claim, "spec").get("storageClassName")
    if name != "" and (missing := classes.missing(name)):
        fix = "create the StorageClass, or delete the claim and name another one"
        return Blocked("StorageClassNotFound", f"{where} is not bound: {missing}: {fix}; {_GOES_ON}")
    if name != "" and not classes.binds_at_once(name):
        return None
    binds = "names no StorageClass" if name == "" else f"StorageClass {name or 'by default'} binds it at once"
    message = f"{where} is not bound ({binds}): kubectl describe pvc tells why; {_GOES_ON}"
    return Blocked("ClaimNotBound", message)
