"""Choose the claim that a capture writes to, and check whether its pod can mount its other volumes.

The claim is either created and kept, or named by the user. A capture borrows GPUs only after all volumes can be
mounted. Secrets are not checked, because the operator may not read them. ``spec.borrowTimeoutSeconds`` covers
missing Secrets and every other cause that the operator cannot see.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import DEFAULT_SIZE, SpecDecodeCaptureSpec, Storage
from specdecode_operator.capture.observation import Capture, MountedObjects, dataset_claim
from specdecode_operator.cluster.drift import is_owned
from specdecode_operator.cluster.manifests import child_labels, owner_reference, render_template
from specdecode_operator.cluster.resources import CAPTURE_LABEL, CAPTURED_DEPLOYMENT_LABEL, PUBLISHED_LABEL
from specdecode_operator.cluster.storage_classes import StorageClasses
from specdecode_operator.deployment.conditions import Blocked
from specdecode_operator.untrusted import mapping, objects

_READ_ONLY = "ReadOnlyMany"
ALREADY_PUBLISHED = "AlreadyPublished"
"""What a pod says, too, that finds the files of an earlier capture of the name."""

_OF_THE_VOLUME = frozenset({"DiskFull", ALREADY_PUBLISHED})
"""Reasons of a failure that is about the volume, beside those that begin with Volume."""


def claim_of(capture: Capture, storage: Storage) -> str:
    """Return the name of the claim that a capture writes to."""
    return storage.existing_claim or capture.claim_name


def render_claim(capture: Capture, deployment: str, storage: Storage) -> Body:
    """Return the claim to create.

    With storage.retain nothing owns it, so it stays when capture and deployment are gone; its labels say whose it is.
    """
    claim = render_template(
        "capture-claim",
        {
            "name": capture.claim_name,
            "size": storage.size or DEFAULT_SIZE,
            "storage_class_name": storage.storage_class_name,
        },
    )
    claim["metadata"] |= {
        "namespace": capture.key.namespace,
        "labels": child_labels(capture.key) | {CAPTURED_DEPLOYMENT_LABEL: deployment} | capture.schedule_label,
        "ownerReferences": owners(capture, storage),
    }
    return claim


def owners(capture: Capture, storage: Storage) -> list[Body]:
    """Return what owns the claim that was created: the capture, where it shall go with it."""
    return [] if storage.retain else [owner_reference(capture.key, capture.uid)]


def is_created_for(capture: Capture, claim: Body) -> bool:
    """Whether a claim was created for a capture of this name: this one, or an earlier one that left it."""
    labels = claim["metadata"].get("labels") or {}
    foreign = [owner for owner in claim["metadata"].get("ownerReferences") or [] if owner["uid"] != capture.uid]
    return labels.get(CAPTURE_LABEL) == capture.key.name and not foreign


def claim_changes(capture: Capture, storage: Storage, claim: Body, *, published: bool) -> Body:
    """Return what is to change in the metadata of a claim that was created; empty where all is as it should be.

    The UID says which claim: another one may have its name when this is written. A claim that holds published files
    holds them for good: nothing is ever overwritten, so its label is not taken away.
    """
    changes: Body = {}
    if is_owned(claim, capture.uid) is storage.retain:  # it was changed since
        changes["ownerReferences"] = owners(capture, storage)
    if published and not is_published(claim):
        changes["labels"] = {PUBLISHED_LABEL: "true"}
    return {**changes, "uid": claim["metadata"]["uid"]} if changes else {}


def is_published(claim: Body) -> bool:
    """Whether a claim is known to hold the files of a capture that succeeded."""
    return (claim["metadata"].get("labels") or {}).get(PUBLISHED_LABEL) == "true"


def claim_blocked(capture: Capture, storage: Storage, claim: Body | None) -> Blocked | None:
    """Return what blocks writing to a claim.

    One that is not bound yet may be waiting for its first pod: the scheduler will say so.
    """
    if claim is None:
        return _missing_claim_blocked(storage)
    name = claim["metadata"]["name"]
    if "deletionTimestamp" in claim["metadata"]:
        return Blocked("ClaimIsLeaving", f"claim {name} is being deleted; goes on when it is gone")
    if (claim.get("status") or {}).get("phase") == "Lost":
        return Blocked("ClaimLost", f"claim {name} has lost its volume: delete it, or name another one", permanent=True)
    if storage.existing_claim is None:
        return _foreign_claim_blocked(capture, claim)
    if (claim.get("spec") or {}).get("accessModes") == [_READ_ONLY]:
        message = f"spec.storage.existingClaim: {name}: can only be read (accessModes {_READ_ONLY}): name another one"
        return Blocked("ClaimReadOnly", message, permanent=True)
    return None


def with_claim(capture: Capture, storage: Storage, failure: Blocked | None) -> Blocked | None:
    """Return a failure with the claim and the field that it is about: a pod knows only where its volume is mounted."""
    if failure is None or not (failure.reason.startswith("Volume") or failure.reason in _OF_THE_VOLUME):
        return failure
    field = "existingClaim" if storage.existing_claim else "size"
    message = f"claim {claim_of(capture, storage)} (spec.storage.{field}): {failure.message}"
    return replace(failure, message=message)


def published_blocked(storage: Storage, claim: Body | None) -> Blocked | None:
    """Return that a claim that was created blocks a capture: it holds a finished capture of this name.

    The volume would tell, but only when the pod has its GPUs. One that is given may hold others: it is not labelled.
    """
    if storage.existing_claim is not None or claim is None or not is_published(claim):
        return None
    message = (
        f"claim {claim['metadata']['name']} holds the files of an earlier capture of this name, which are never"
        " overwritten: choose another name, or delete the claim with its files"
    )
    return Blocked(ALREADY_PUBLISHED, message, permanent=True)


def _missing_claim_blocked(storage: Storage) -> Blocked | None:
    """Only a claim that is given must be there already."""
    if storage.existing_claim is None:
        return None
    message = f"spec.storage.existingClaim: {storage.existing_claim}: there is no such claim; goes on when it exists"
    return Blocked("ClaimNotFound", message)


def _foreign_claim_blocked(capture: Capture, claim: Body) -> Blocked | None:
    if is_created_for(capture, claim):
        return None
    name = claim["metadata"]["name"]
    if (claim["metadata"].get("labels") or {}).get(CAPTURE_LABEL) == capture.key.name:
        return Blocked("WaitingForCleanup", f"claim {name} of an earlier capture of this name is still being removed")
    message = (
        f"claim {name} exists and was not created for this capture; it is left untouched: write to it with"
        " spec.storage.existingClaim, or rename this object"
    )
    return Blocked("ChildNameConflict", message, permanent=True)


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
