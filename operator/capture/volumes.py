"""The claim that a capture writes to: one that is created and kept, or one that is given."""

from dataclasses import replace

from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import DEFAULT_SIZE, Storage
from specdecode_operator.capture.control.capture import Capture
from specdecode_operator.deployment.blocked import Blocked
from specdecode_operator.kube.drift import is_owned
from specdecode_operator.kube.labels import CAPTURE_LABEL, CAPTURED_DEPLOYMENT_LABEL, PUBLISHED_LABEL
from specdecode_operator.kube.manifests import child_labels, owner_reference, render_template

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
