"""Render the Job of a training."""

import json
from dataclasses import dataclass

from specdecode_operator.api.base import Body
from specdecode_operator.api.training import SpecDecodeTrainingSpec
from specdecode_operator.capture.observation import CapturedDeployment
from specdecode_operator.capture.volumes import claim_of
from specdecode_operator.cluster.manifests import child_labels, owned
from specdecode_operator.training.job_status import EXPORT, PUBLISH, STEPS
from specdecode_operator.training.observation import Training


@dataclass(frozen=True)
class TrainingInputs:
    """Objects that a training reads, which exist and were checked."""

    captures: tuple[Body, ...]  # SpecDecodeCaptures in the order of spec.captures; empty with spec.dataset
    gpus: int  # of the trainer; 0 on a CPU


def render_job(
    training: Training,
    spec: SpecDecodeTrainingSpec,
    source: CapturedDeployment,  # noqa: ARG001
    inputs: TrainingInputs,
    operator_image: str,
) -> Body:
    """Return the Job of a training: one pod whose containers run one after the other."""
    limits = {"limits": {"nvidia.com/gpu": inputs.gpus}} if inputs.gpus else {}
    document = spec.model_dump(mode="json", by_alias=True, exclude={"storage", "suspend", "promote"})
    settings: list[Body] = [
        {"name": "SPECDECODE_TRAINING", "value": json.dumps(document, sort_keys=True).replace("$", "$$")}
    ]
    containers = [
        {
            "name": name,
            "image": operator_image if name in {EXPORT, PUBLISH} else spec.trainer.image,
            "env": settings,
            "terminationMessagePolicy": "File",
        }
        for name in STEPS
    ]
    pod_spec = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "activeDeadlineSeconds": spec.deadline_seconds,
        "initContainers": [each | ({"resources": limits} if limits else {}) for each in containers[:-1]],
        "containers": containers[-1:],
        "volumes": [
            {"name": "training", "persistentVolumeClaim": {"claimName": claim_of(training, spec.storage)}},
        ],
    }
    job: Body = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": training.job_name},
        "spec": {
            "suspend": bool(training.queue_labels),
            "backoffLimit": spec.backoff_limit,
            "template": {"metadata": {"labels": child_labels(training.key)}, "spec": pod_spec},
        },
    }
    job = owned(job, training.key, training.uid)
    job["metadata"]["labels"] |= training.queue_labels
    return job
