"""Render the capture that measures a new head, and read its result."""

from specdecode_operator.api.base import API_VERSION, Body
from specdecode_operator.api.capture import KIND
from specdecode_operator.api.training import SpecDecodeTrainingSpec, TrainedHead, TrainingVerdict
from specdecode_operator.cluster.manifests import owned
from specdecode_operator.deployment.conditions import UNKNOWN, ConditionUpdate
from specdecode_operator.training.observation import Training


def judging_capture(training: Training, spec: SpecDecodeTrainingSpec, head: TrainedHead) -> Body:  # noqa: ARG001
    """Return the SpecDecodeCapture that measures a head on held-out prompts."""
    body: Body = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": f"{training.key.name}-judge"},
        "spec": {"deployment": spec.deployment, "seed": spec.seed, "record": {"stepStats": False}},
    }
    body = owned(body, training.key, training.uid)
    body["metadata"]["annotations"]["specdecode.io/judgement"] = spec.judgement.model_dump_json(by_alias=True)
    return body


def better(capture: Body) -> tuple[ConditionUpdate, TrainingVerdict]:
    """Return the condition Better and the verdict of a capture that ended."""
    update = ConditionUpdate("Better", UNKNOWN, "NotJudged", "Not implemented")
    return update, TrainingVerdict(capture=capture["metadata"]["name"])
