"""Trainings whose heads are better than the draft of their deployment."""

from typing import Any

from specdecode_operator.api.base import API_VERSION
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.training.offers import target_digest
from tests.support.objects import TINY_CONFIG, Body, tiny_cpu

SHA256 = "ab" * 32

HEAD_CONFIG: Body = {
    "architectures": ["Eagle3DraftModel"],
    "draft_vocab_size": 512,
    "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    "norm_before_residual": True,
    "speculators_config": {
        "algorithm": "eagle3",
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "pair/target"},
    },
    "speculators_model_type": "eagle3",
    "torch_dtype": "bfloat16",
    "transformer_layer_config": {**TINY_CONFIG, "num_hidden_layers": 1},
}
"""config.json of an EAGLE-3 head for the tiny target, as speculators writes it."""


def asking(**changes: Any) -> Body:
    """Spec of the tiny pair that serves trained heads."""
    spec = tiny_cpu(**changes)
    spec["speculation"]["trainedDrafts"] = True
    return spec


def condition(type_: str, status: str, reason: str = "Because") -> Body:
    told = {"type": type_, "status": status, "reason": reason, "message": "m", "observedGeneration": 1}
    return {**told, "lastTransitionTime": "2026-01-01T00:00:00Z"}


def head(name: str = "chat", namespace: str = "team", **changes: Any) -> Body:
    """A published head, as the status of a training has it."""
    path = f"{namespace}/{name}/head"
    return {"path": path, "sha256": SHA256, "bytes": 1000, "config": HEAD_CONFIG, **changes}


def better_training(
    name: str = "chat",
    *,
    created: str = "2026-01-01T00:00:00Z",
    spec: Body | None = None,
    status: Body | None = None,
    of: Body | None = None,
) -> Body:
    """A training of deployment llama in namespace team whose head is better.

    ``of`` is the spec of the deployment; ``spec`` and ``status`` replace whole fields.
    """
    target = SpecDecodeDeploymentSpec.parse(of or asking()).target
    return {
        "apiVersion": API_VERSION,
        "kind": "SpecDecodeTraining",
        "metadata": {
            "namespace": "team",
            "name": name,
            "uid": f"uid-{name}",
            "generation": 1,
            "resourceVersion": "1",
            "creationTimestamp": created,
        },
        "spec": {
            "deployment": "llama",
            "captures": ["chat"],
            "trainer": {"image": "localhost/trainer:1"},
            "promote": "OnBetter",
            **(spec or {}),
        },
        "status": {
            "phase": "Complete",
            "claim": f"{name}-training",
            "head": head(name),
            "rows": {"training": 900, "holdout": 100, "duplicates": 0, "tokens": 90_000},
            "verdict": {"capture": f"{name}-judge", "target": target_digest(target)},
            "conditions": [condition("Better", "True", "Better")],
            **(status or {}),
        },
    }
