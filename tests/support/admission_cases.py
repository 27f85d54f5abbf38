"""Objects that the API server's own checks let pass, and that nobody should store: with the reason that is given."""

from typing import Any

from specdecode_operator.api.base import API_VERSION, Body
from tests.support.objects import HUB_TOKEN, pair_70b

ADMITTED: Body = pair_70b(models=HUB_TOKEN)
"""A spec that nothing is wrong with."""

REFUSED: dict[str, tuple[Body, str]] = {
    "a directory of nodes": (
        pair_70b(models={"volume": {"hostPath": {"path": "/etc"}}}),
        "HostPathNotAllowed",
    ),
    "the network of nodes": (pair_70b(podTemplate={"spec": {"hostNetwork": True}}), "PodTemplateNotAllowed"),
    "a flag that the operator sets": (
        pair_70b(engine={"extraArgs": ["--tensor-parallel-size", "4"]}),
        "Invalid",
    ),
    "a variable that the operator sets": (
        pair_70b(engine={"env": [{"name": "VLLM_SERVER_DEV_MODE", "value": "1"}]}),
        "Invalid",
    ),
    "a GPU that nobody knows": (pair_70b(accelerator={"products": ["NVIDIA-H900"]}), "Invalid"),
    "a version that is too old": (pair_70b(engine={"version": "0.1"}), "Invalid"),
    "longer than the model": (pair_70b(serving={"maxModelLen": 1_000_000}), "Invalid"),
    "another vocabulary": (
        pair_70b(
            speculation={
                "method": "draft_model",
                "numSpeculativeTokens": 5,
                "draft": {"model": "Qwen/Qwen3-8B"},
            }
        ),
        "Invalid",
    ),
    "heads that cannot be shared out": (pair_70b(parallelism={"tensor": 3}), "Invalid"),
    "a time that never comes": (
        pair_70b(captures=[{"name": "nightly", "schedule": "0 0 31 2 *", "template": {}}]),
        "Invalid",
    ),
}
"""SpecDecodeDeployments' specs, and the reason that `Accepted` would have."""

TOO_LARGE: Body = pair_70b(
    models=HUB_TOKEN, parallelism={"tensor": 1}, serving={"maxModelLen": 8192, "minConcurrency": 256}
)
"""A spec that fits on no GPU that is known."""

REFUSED_CAPTURE: Body = {
    "deployment": "chat",
    "deadlineSeconds": 30,
    "workload": {"phases": [{"name": "all", "pattern": "Poisson", "durationSeconds": 600, "requestsPerSecond": "1"}]},
}
"""A capture's spec whose load takes longer than its deadline."""


def deployment(spec: Any, name: str = "chat") -> Body:
    """Return a SpecDecodeDeployment."""
    return {"apiVersion": API_VERSION, "kind": "SpecDecodeDeployment", "metadata": {"name": name}, "spec": spec}


def capture(spec: Any, name: str = "chat-1") -> Body:
    """Return a SpecDecodeCapture."""
    return {"apiVersion": API_VERSION, "kind": "SpecDecodeCapture", "metadata": {"name": name}, "spec": spec}
