"""Reviews of pods: only those start that an attestation of their deployment's rollouts speaks of."""

import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final

from specdecode_operator.admission.review import NoReviewError, allowed, refused, request_of
from specdecode_operator.api.base import Body
from specdecode_operator.api.key import Key
from specdecode_operator.attestation.gate import Gate, engine_labels, owner_of
from specdecode_operator.cluster.errors import ClusterError, ForbiddenError
from specdecode_operator.kube.labels import (
    ATTESTED_PODS_LABEL,
    CAPTURE_LABEL,
    COMPUTES_FOR_LABEL,
    DEPLOYMENT_LABEL,
    READS_FOR_LABEL,
)
from specdecode_operator.kube.resources import POD
from specdecode_operator.kube.untyped import mapping
from specdecode_operator.problems import shown

Read = Callable[[Key], Body | None]
"""Returns the ConfigMap with the attestations of a deployment, as it is now; None where there is none."""

_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
"""Of an object. It becomes part of a path at the API server, and the labels of a pod are anybody's."""

_BORN: Final = (
    "a pod is an engine's from its creation or never:"
    f" its labels {DEPLOYMENT_LABEL} and {COMPUTES_FOR_LABEL} stay as they are; delete it"
)
"""What ran before in one that becomes an engine's was not asked about, and its files are there still."""


def answer_pod(review: Any, gate: Gate, read: Read) -> Body:
    """Return the answer to an AdmissionReview of a pod that is created or changed.

    Raises
    ------
    NoReviewError
        When it is none, or of another kind.
    """
    request = request_of(review)
    pod, before = mapping(request, "object"), mapping(request, "oldObject")
    if (pod.get("apiVersion"), pod.get("kind")) != (POD.api_version, POD.kind):
        raise NoReviewError("send reviews of pods that are created or changed: nothing else is judged here")
    if before and engine_labels(pod) != engine_labels(before):
        return refused(request, HTTPStatus.FORBIDDEN, _BORN)
    if before and gate.is_unchanged(pod, before):
        return allowed(request)
    return _judged(request, gate, read)


def _judged(request: Body, gate: Gate, read: Read) -> Body:
    pod, before = mapping(request, "object"), mapping(request, "oldObject")
    owner, namespace = owner_of(pod), request.get("namespace")
    if owner is None:
        return refused(request, HTTPStatus.FORBIDDEN, f"only engines with an attestation start here: {_stranger(pod)}")
    if not _is_name(owner) or not _is_name(namespace):
        message = f"{shown(owner)} in {shown(namespace)}: is no name of a SpecDecodeDeployment and its namespace"
        return refused(request, HTTPStatus.FORBIDDEN, message)
    key = Key(str(namespace), str(owner))
    try:
        kept = read(key)
        refusal = gate.refusal_of_change(pod, before, key, kept) if before else gate.refusal(pod, key, kept)
    except ForbiddenError:
        message = f"its attestation cannot be read: let the webhook get ConfigMaps in namespace {namespace}"
        return refused(request, HTTPStatus.SERVICE_UNAVAILABLE, message)
    except ClusterError as error:
        return refused(request, HTTPStatus.SERVICE_UNAVAILABLE, f"its attestation cannot be read: {error}")
    return refused(request, HTTPStatus.FORBIDDEN, f"engine of {key}: {refusal}") if refusal else allowed(request)


def _stranger(pod: Body) -> str:
    """Return why a pod that says to be no engine's is none, and what helps where it is one of the operator's own."""
    labels = mapping(mapping(pod, "metadata"), "labels")
    let_in = f"label the namespace {ATTESTED_PODS_LABEL}=engines"
    if CAPTURE_LABEL in labels:
        return f"captures are not attested; {let_in}, or capture the deployment in a namespace that has it"
    if READS_FOR_LABEL in labels:
        return (
            "Jobs that read or download models are not attested;"
            f" give each model with its config on a claim or in the image, without models.cache, or {let_in}"
        )
    return f"the pod has no label {DEPLOYMENT_LABEL}"


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(_NAME.fullmatch(value))
