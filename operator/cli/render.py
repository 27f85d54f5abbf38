"""What the operator would make of objects in files, without a cluster.

What only a cluster knows is left out, such as the uid of an owner, or has a stand-in that says so, such as the commit
that a cache holds of a branch.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import SpecDecodeCaptureSpec
from specdecode_operator.api.status.capture import SpecDecodeCaptureStatus
from specdecode_operator.api.status.deployment import Condition, ConditionStatus
from specdecode_operator.capture.control.arms import arm_states
from specdecode_operator.capture.control.capture import Capture, read_capture
from specdecode_operator.capture.control.decision import decide as decide_capture
from specdecode_operator.capture.control.observation import CaptureObservation, ObservedDeployment
from specdecode_operator.capture.control.volume import claim_of
from specdecode_operator.deployment.cluster_state import ClusterState
from specdecode_operator.deployment.decision import decide
from specdecode_operator.deployment.desired_state import DesiredState, NotLaunched
from specdecode_operator.deployment.models.download import wanted_downloads
from specdecode_operator.deployment.pods.readiness import Readiness
from specdecode_operator.deployment.spec.model_storage import COMMIT
from specdecode_operator.deployment.spec.parent import Parent, read_parent
from specdecode_operator.kube.labels import APPLIED_HASH_ANNOTATION
from specdecode_operator.kube.nodes import NodeFacts
from specdecode_operator.kube.pod_policy import NONE_ALLOWED
from specdecode_operator.kube.resources import JOB
from specdecode_operator.problems import InvalidSpecError
from specdecode_operator.sizing.pair.calibration import UNCALIBRATED, Calibration

OPERATOR_IMAGE: Final = "localhost/specdecode/operator:dev"
"""The chart's default. Load generators of captures, and replays, run from the operator's own image."""

_NAMESPACE: Final = "default"
_NOT_KNOWN: Final = "known-in-the-cluster"
"""For a uid, and for the claim of a golden capture that is in no file."""

_NO_COMMIT: Final = "not-downloaded-yet"
"""For a branch or tag: only the download finds out which commit it is."""

_ANY_TIME: Final = datetime(2000, 1, 1, tzinfo=UTC)
"""Nothing that is rendered depends on it."""


class NotRenderedError(Exception):
    """Nothing is made of an object; why, without a full stop."""

    def __init__(self, readiness: Readiness) -> None:
        super().__init__(readiness.message)
        self.reason = readiness.reason
        self.may_pass = not readiness.stalled


@dataclass(frozen=True)
class AssumedCluster:
    """What is taken for granted, where the operator would look."""

    nodes: tuple[NodeFacts, ...]
    calibration: Calibration = UNCALIBRATED
    pod_template: frozenset[str] = NONE_ALLOWED
    operator_image: str = OPERATOR_IMAGE


@dataclass(frozen=True)
class RenderedDeployment:
    """What one SpecDecodeDeployment comes to."""

    parent: Parent
    desired: DesiredState
    body: Body
    cluster: AssumedCluster

    downloads: tuple[Body, ...] = ()
    """Jobs that fill its cache of models; what is desired comes when they have ended."""

    @property
    def objects(self) -> list[Body]:
        """All that is made for it, in the order of creation."""
        return [*self.downloads, *self.desired.children]


def render_deployment(body: Body, cluster: AssumedCluster) -> RenderedDeployment:
    """Return what the operator makes of a SpecDecodeDeployment whose models the catalogue or the spec describes.

    Raises
    ------
    NotRenderedError
        When it launches nothing for it.
    """
    parent = read_parent(as_stored(body))
    desired = _desired_state(parent, cluster)
    if isinstance(desired.outcome, NotLaunched):
        raise NotRenderedError(desired.outcome.readiness)
    before = decide(parent, _state(cluster)) if desired.outcome.facts.spec.models.cache else desired
    downloads = [child for child in before.children if child["kind"] == JOB.kind]
    return RenderedDeployment(parent, desired, body, cluster, tuple(downloads))


def _desired_state(parent: Parent, cluster: AssumedCluster) -> DesiredState:
    """Return what should exist for an object once its models are downloaded."""
    wanted = set() if isinstance(parent.spec, InvalidSpecError) else set(wanted_downloads(parent.spec).values())
    commits = {source.key: _commit(source.revision) for source in wanted}
    return decide(parent, replace(_state(cluster), downloads=commits))


def _state(cluster: AssumedCluster) -> ClusterState:
    return ClusterState(
        nodes=cluster.nodes,
        calibration=cluster.calibration,
        # Which directories of nodes are allowed says the operator's command line.
        host_paths=("/",),
        pod_template=cluster.pod_template,
        has_leader_worker_sets=True,
        operator_image=cluster.operator_image,
    )


def render_capture(
    body: Body, captured: RenderedDeployment, golden: Body | None = None, operator_image: str | None = None
) -> list[Body]:
    """Return claim and Job of a valid SpecDecodeCapture; what it names beside its deployment is taken to be there.

    ``golden`` is the capture that it is held against, where that is known: whether it fits is looked at then.

    Raises
    ------
    NotRenderedError
        When it is refused.
    """
    capture, parent = read_capture(as_stored(body)), captured.parent
    arms = arm_states(
        SpecDecodeCaptureSpec.parse(body["spec"]),
        captured.body,
        captured.desired.outcome,
        lambda _, changed: _desired_state(read_parent(as_stored(changed)), captured.cluster),
    )
    deployment = ObservedDeployment(parent.key, parent.uid, parent.generation, captured.desired, arms)
    image = operator_image or OPERATOR_IMAGE
    named = _named_objects(capture.spec)
    observed = CaptureObservation(deployment, operator_image=image, golden=_as_golden(capture, golden), **named)
    decision = decide_capture(capture, observed, _ANY_TIME)
    if decision.writes.job is None:
        raise NotRenderedError(decision.readiness)
    return [each for each in (decision.writes.claim, decision.writes.job) if each is not None]


def without_owner(objects: Iterable[Body]) -> list[Body]:
    """Return objects without what binds them to their owner in a cluster: nobody could apply them with it."""
    return [{**body, "metadata": _unbound(body["metadata"])} for body in objects]


def as_stored(body: Body) -> Body:
    """Return an object with what the API server would add to it: namespace, uid, generation, resource version."""
    metadata = {"namespace": _NAMESPACE, "uid": _NOT_KNOWN, "generation": 1, "resourceVersion": "1", **body["metadata"]}
    return {**body, "metadata": metadata}


def _commit(revision: str | None) -> str:
    return revision if revision and COMMIT.fullmatch(revision) else _NO_COMMIT


def _named_objects(spec: Body) -> dict[str, Any]:
    """Return the claim and the dataset that a capture names, as if they were there."""
    claim = spec.get("storage", {}).get("existingClaim")
    dataset = spec.get("workload", {}).get("prompts", {}).get("dataset")
    return {
        "claim": {"metadata": {"name": claim}, "spec": {"accessModes": ["ReadWriteMany"]}} if claim else None,
        "dataset": {"data": {dataset["path"]: ""}} if dataset else None,
    }


def _as_golden(capture: Capture, golden: Body | None) -> Body | None:
    """Return what a capture is held against as if it had succeeded; unknown, it is like the capture itself."""
    against = capture.spec.get("against")
    if against is None:
        return None
    if golden is None:
        spec = {**capture.spec, "storage": {"existingClaim": _NOT_KNOWN}}
        golden = {"metadata": {"namespace": capture.key.namespace, "name": against["capture"]}, "spec": spec}
    known = read_capture(as_stored(golden))
    succeeded = Condition(
        type="Succeeded",
        status=ConditionStatus.TRUE,
        reason="Captured",
        message="",
        observed_generation=known.generation,
        last_transition_time=f"{_ANY_TIME:%Y-%m-%dT%H:%M:%SZ}",
    )
    claim = claim_of(known, SpecDecodeCaptureSpec.parse(known.spec).storage)
    status = SpecDecodeCaptureStatus(claim=claim, conditions=[succeeded])
    return {**as_stored(golden), "status": status.model_dump(mode="json", by_alias=True, exclude_none=True)}


def _unbound(metadata: Body) -> Body:
    kept = {name: value for name, value in metadata.items() if name != "ownerReferences"}
    annotations = {
        name: value for name, value in (kept.pop("annotations", None) or {}).items() if name != APPLIED_HASH_ANNOTATION
    }
    return {**kept, "annotations": annotations} if annotations else kept
