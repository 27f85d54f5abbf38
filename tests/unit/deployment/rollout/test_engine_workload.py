"""Which pods belong to the workloads of an object."""

import pytest

from specdecode_operator.api.deployment import Key
from specdecode_operator.deployment.rollout.engine_workload import engine_pods

KEY = Key("team", "llama")


@pytest.mark.parametrize(
    ("kind", "name", "is_own"),
    [
        ("ReplicaSet", "llama-5d7f", True),
        ("ReplicaSet", "llama-canary-5d7f", True),
        ("ReplicaSet", "llama-6c8a", False),
        ("ReplicaSet", "llama-70b-5d7f", False),
        ("StatefulSet", "llama-lws", True),
        ("StatefulSet", "llama-lws-12", True),
        ("StatefulSet", "llama-lws-x", False),
        ("StatefulSet", "llama", False),
        ("DaemonSet", "llama-5d7f", False),
    ],
)
def test_only_pods_of_the_workloads_controllers_are_engines(kind: str, name: str, *, is_own: bool) -> None:
    owner = {"kind": kind, "name": name, "uid": "u", "controller": True}
    pod = {"metadata": {"labels": {"pod-template-hash": "5d7f"}, "ownerReferences": [owner]}}
    assert engine_pods([pod], KEY) == ([pod] if is_own else [])
    no_controller = {"metadata": {**pod["metadata"], "ownerReferences": [{**owner, "controller": False}]}}
    assert engine_pods([no_controller], KEY) == []
