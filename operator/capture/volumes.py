"""Choose the claim that a capture writes to, and check whether its pod can mount its other volumes.

The claim is either created and kept, or named by the user. A capture borrows GPUs only after all volumes can be
mounted. Secrets are not checked, because the operator may not read them. ``spec.borrowTimeoutSeconds`` covers
missing Secrets and every other cause that the operator cannot see.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import DEFAULT_SIZE, SpecDecodeCaptureSpec, Storage
from specdecode_operator.api.deployment import Key
from specdecode_operator.capture.observation import Capture, MountedObjects, dataset_claim
from specdecode_operator.cluster.drift import is_owned
from specdecode_operator.cluster.manifests import child_labels, owner_reference, parent_label, render_template
from specdecode_operator.cluster.resources import CAPTURED_DEPLOYMENT_LABEL, PUBLISHED_LABEL
from specdecode_operator.cluster.storage_classes import StorageClasses
from specdecode_operator.deployment.conditions import Blocked
from specdecode_operator.untrusted import mapping, objects

_READ_ONLY = "ReadOnlyMany"
# Also the reason of a pod that finds the files of an earlier capture with its name.
ALREADY_PUBLISHED = "AlreadyPublished"
# Reasons of volume failures, beside those that begin with Volume.
_OF_THE_VOLUME = frozenset({"DiskFull", ALREADY_PUBLISHED})


class ClaimUser(Protocol):
    """Capture or training that writes to a claim."""

    @property
    def key(self) -> Key:
        """Key of the object."""

    @property
    def uid(self) -> str:
        """UID of the object."""

    @property
    def job_name(self) -> str:
        """Name of the claim that is created for it."""

    @property
    def schedule_label(self) -> dict[str, str]:
        """Label by which a schedule's retention counts the claim."""


def claim_of(user: ClaimUser, storage: Storage) -> str:
    """Return the name of the claim that a capture or training writes to."""
    return storage.existing_claim or user.job_name


def render_claim(user: ClaimUser, deployment: str, storage: Storage, default_size: str = DEFAULT_SIZE) -> Body:
    """Return the claim to create; with storage.retain it has no owner, and outlives its user and the deployment."""
    values = {
        "name": user.job_name,
        "size": storage.size or default_size,
        "storage_class_name": storage.storage_class_name,
    }
    claim = render_template("capture-claim", values)
    claim["metadata"] |= {
        "namespace": user.key.namespace,
        "labels": child_labels(user.key) | {CAPTURED_DEPLOYMENT_LABEL: deployment} | user.schedule_label,
        "ownerReferences": _owners(user, storage),
    }
    return claim


def _owners(user: ClaimUser, storage: Storage) -> list[Body]:
    return [] if storage.retain else [owner_reference(user.key, user.uid)]


def _kind_of(user: ClaimUser) -> str:
    return user.key.kind.removeprefix("SpecDecode").lower()


def claim_changes(user: ClaimUser, storage: Storage, claim: Body, *, published: bool) -> Body:
    """Return the changes to the metadata of a created claim, with the UID that they are for; empty without changes."""
    changes: Body = {}
    if is_owned(claim, user.uid) is storage.retain:  # storage.retain has changed since
        changes["ownerReferences"] = _owners(user, storage)
    # The label is never removed, because published files are never overwritten.
    if published and not is_published(claim):
        changes["labels"] = {PUBLISHED_LABEL: "true"}
    return {**changes, "uid": claim["metadata"]["uid"]} if changes else {}


def is_published(claim: Body) -> bool:
    """Return whether a claim is labelled as holding the files of a successful capture or training."""
    return (claim["metadata"].get("labels") or {}).get(PUBLISHED_LABEL) == "true"


def claim_blocked(user: ClaimUser, storage: Storage, claim: Body | None) -> Blocked | None:
    """Return what blocks writing to a claim; an unbound one may wait for its first pod."""
    if claim is None:  # then it is created, unless the user named it
        wanted = storage.existing_claim
        field = "spec.storage.persistentVolumeClaim.claimName"
        message = f"{field}: {wanted}: claim not found; the {_kind_of(user)} starts when it exists"
        return None if wanted is None else Blocked("ClaimNotFound", message)
    name, metadata = claim["metadata"]["name"], claim["metadata"]
    if "deletionTimestamp" in metadata:
        return Blocked("ClaimIsLeaving", f"claim {name} is being deleted; continues when it is gone")
    if (claim.get("status") or {}).get("phase") == "Lost":
        return Blocked("ClaimLost", f"claim {name} has lost its volume: delete it, or name another one", permanent=True)
    if storage.existing_claim is not None:
        is_readable_only = (claim.get("spec") or {}).get("accessModes") == [_READ_ONLY]
        field = "spec.storage.persistentVolumeClaim.claimName"
        message = f"{field}: {name}: is read-only (accessModes {_READ_ONLY}): name another one"
        return Blocked("ClaimReadOnly", message, permanent=True) if is_readable_only else None
    if (metadata.get("labels") or {}).get(parent_label(user.key.kind)) == user.key.name:
        # It was created for an object of this name: this one, or an earlier one that left it.
        is_foreign = any(owner["uid"] != user.uid for owner in metadata.get("ownerReferences") or [])
        message = f"claim {name} of an earlier {_kind_of(user)} of this name is still being removed"
        return Blocked("WaitingForCleanup", message) if is_foreign else None
    message = (
        f"claim {name} exists and was not created for this {_kind_of(user)}; it is left untouched: write to it with"
        " spec.storage.persistentVolumeClaim.claimName, or rename this object"
    )
    return Blocked("ChildNameConflict", message, permanent=True)


def with_claim(user: ClaimUser, storage: Storage, failure: Blocked | None) -> Blocked | None:
    """Add claim and field to a failure of the volume, because a pod only has its mount path."""
    if failure is None or not (failure.reason.startswith("Volume") or failure.reason in _OF_THE_VOLUME):
        return failure
    field = "persistentVolumeClaim.claimName" if storage.existing_claim else "size"
    message = f"claim {claim_of(user, storage)} (spec.storage.{field}): {failure.message}"
    return replace(failure, message=message)


def published_blocked(user: ClaimUser, storage: Storage, claim: Body | None) -> Blocked | None:
    """Return that the created claim already holds files of this name; a claim of the user is not labelled."""
    if storage.existing_claim is not None or claim is None or not is_published(claim):
        return None
    message = (
        f"claim {claim['metadata']['name']} has the files of an earlier {_kind_of(user)} of this name, which are never"
        " overwritten: choose another name, or delete the claim with its files"
    )
    return Blocked(ALREADY_PUBLISHED, message, permanent=True)


_GOES_ON = "the deployment keeps serving; the capture continues when this is fixed"


def mounted_names(pod_spec: Body) -> tuple[list[str], list[str]]:
    """Return the names of the claims and of the required ConfigMaps that a pod spec mounts."""
    mounts = objects(pod_spec, "volumes")
    claims = {str(mapping(each, "persistentVolumeClaim").get("claimName") or "") for each in mounts}
    config_maps = [mapping(each, "configMap") for each in mounts]
    required = {str(each["name"]) for each in config_maps if each.get("name") and not each.get("optional")}
    return sorted(claims - {""}), sorted(required)


def class_blocked(spec: SpecDecodeCaptureSpec, mounted: MountedObjects) -> Blocked | None:
    """Return that the StorageClass of the claim to create does not exist."""
    missing = None if mounted.classes is None else mounted.classes.missing(spec.storage.storage_class_name)
    if missing is None:
        return None
    fix = "create it, or correct the name in another capture"
    if spec.storage.storage_class_name is None:
        fix = "name one in another capture, or mark one as the default"
    message = (
        f"spec.storage.storageClassName: {spec.storage.storage_class_name or 'not set'}: {missing}: {fix}, or name an"
        f" existing claim in spec.storage.persistentVolumeClaim.claimName; {_GOES_ON}"
    )
    return Blocked("StorageClassNotFound", message)


def waits_for_binding(spec: SpecDecodeCaptureSpec, mounted: MountedObjects) -> Blocked | None:
    """Return that a newly created claim must be bound before the GPUs are borrowed."""
    name = spec.storage.storage_class_name
    if mounted.classes is None or not mounted.classes.binds_at_once(name):
        return None
    which = f"StorageClass {name}" if name else "the default StorageClass"
    message = f"spec.storage: waiting until {which} binds the new claim"
    return Blocked("ClaimNotBound", message)


def mounts_blocked(capture: Capture, spec: SpecDecodeCaptureSpec, mounted: MountedObjects) -> Blocked | None:
    """Return the first mounted object that would keep the capture's pod from starting."""
    return next(_blocked_mounts(capture, spec, mounted), None)


def _blocked_mounts(capture: Capture, spec: SpecDecodeCaptureSpec, mounted: MountedObjects) -> Iterator[Blocked]:
    own = claim_of(capture, spec.storage)
    fields = {
        own: f"spec.storage.{'persistentVolumeClaim.claimName' if spec.storage.existing_claim else 'storageClassName'}",
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
    """Return why no pod can use a claim yet; None if it is bound, or will be by its first pod."""
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
    binds = "names no StorageClass" if name == "" else f"StorageClass {name or 'by default'} binds it immediately"
    message = f"{where} is not bound ({binds}): see kubectl describe pvc; {_GOES_ON}"
    return Blocked("ClaimNotBound", message)
