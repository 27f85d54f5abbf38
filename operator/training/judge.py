"""Render the capture that measures a new head, and read its result."""

from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import KIND
from specdecode_operator.api.training import SpecDecodeTrainingSpec, TrainedHead, TrainingVerdict
from specdecode_operator.cluster.manifests import owned
from specdecode_operator.deployment.conditions import UNKNOWN, ConditionUpdate
from specdecode_operator.training.observation import Training


def judging_capture(training: Training, spec: SpecDecodeTrainingSpec, head: TrainedHead) -> Body:  # noqa: ARG001
    """Return the SpecDecodeCapture that measures a head on held-out prompts."""
    metadata = {"name": f"{training.key.name}-judge"}
    body = {"apiVersion": "specdecode.io/v1alpha1", "kind": KIND, "metadata": metadata}
    return owned({**body, "spec": {"deployment": spec.deployment}}, training.key, training.uid)


def better(capture: Body) -> tuple[ConditionUpdate, TrainingVerdict]:
    """Return the condition Better and the verdict of a capture that ended."""
    update = ConditionUpdate("Better", UNKNOWN, "NotJudged", "Not implemented")
    return update, TrainingVerdict(capture=capture["metadata"]["name"])
