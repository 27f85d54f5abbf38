"""vLLM itself in a pod, without weights and GPU: the operator's image writes its files, vLLM's for the CPU serves."""

import json
from typing import Any, Final

from specdecode_operator.api.base import API_VERSION, Body
from specdecode_operator.api.deployment import KIND
from specdecode_operator.api.key import Key
from specdecode_operator.deployment.objects.pod_user import container_user
from specdecode_operator.deployment.spec.facts import Facts
from specdecode_operator.deployment.spec.pod_template_merge import PREPARE
from specdecode_operator.engine.environment import FIXED_VARIABLES
from specdecode_operator.engine.settings import Platform
from specdecode_operator.sizing.choice.plan import Plan

RECORDING_PATH: Final = "/recording"
USER_ID: Final = 65532
"""As whom captures write."""

_FOLDER: Final = "/tmp/emulated"  # noqa: S108  the pod's own
_TMP: Final = {"name": "tmp", "mountPath": "/tmp"}  # noqa: S108  the pod's own

_PREPARE: Final = 'printf %s "$0" | exec specdecode replay prepare --plan=- "$@"'

_REQUESTS: Final = {"cpu": "1", "memory": "3Gi"}
"""The server and the core of an engine that computes nothing; less than 2 GiB was seen."""


def emulated_engine(key: Key, facts: Facts, plan: Plan, mount: Body) -> dict[str, Any]:
    """Return what is an emulated engine's own of a pod."""
    own_env = {variable.name: variable.value for variable in facts.spec.engine.env}
    env = FIXED_VARIABLES | own_env
    return {
        "image": facts.spec.engine.image or facts.profile.images[Platform.CPU],
        "command": ["python3", f"{_FOLDER}/start.py", "--host=0.0.0.0", f"--port={facts.spec.serving.port}"],
        "env": [{"name": name, "value": value} for name, value in sorted(env.items())],
        "resources": {"requests": _REQUESTS},
        "prepare": _prepare(key, facts, plan, mount),
        "shm_gib": 1,
    }


def _prepare(key: Key, facts: Facts, plan: Plan, mount: Body) -> Body:
    """Return the container that writes the engine's files, for the plan that is in force and no other."""
    replay = facts.replay
    assert replay is not None  # noqa: S101  there would be no such pod
    flags = [f"--out={_FOLDER}", f"--seed={replay.seed}", f"--num-gpu-blocks={plan.chosen.budget.num_blocks}"]
    words = [_planned_object(key, facts, plan), f"{RECORDING_PATH}/{replay.trace.path}", *flags]
    return {
        "name": PREPARE,
        "image": facts.operator_image,
        # The kubelet puts variables in for $(NAME).
        "command": ["/bin/sh", "-c", _PREPARE.replace("$", "$$"), *(word.replace("$", "$$") for word in words)],
        "securityContext": {
            **container_user(facts.spec, PREPARE, USER_ID),
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [mount, _TMP],
    }


def _planned_object(key: Key, facts: Facts, plan: Plan) -> str:
    """Return the object, with what the plan chose said in it, and without what says nothing of its engine."""
    spec = facts.spec.model_dump(
        mode="json", by_alias=True, exclude_defaults=True, exclude={"pod_template", "captures"}
    )
    chosen = plan.chosen
    spec["parallelism"] = {**spec.get("parallelism", {}), "tensor": chosen.tensor}
    if not facts.on_cpu:
        spec["accelerator"] = {**spec.get("accelerator", {}), "product": [chosen.product]}
    metadata = {"name": key.name, "namespace": key.namespace}
    return json.dumps({"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec}, sort_keys=True)
