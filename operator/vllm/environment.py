"""Build the engine container's environment, and reject variables that the operator sets."""

from collections.abc import Iterable

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import EnvVar
from specdecode_operator.problems import Problem
from specdecode_operator.vllm.settings import EngineSettings

API_KEY_VARIABLE = "VLLM_API_KEY"
"""Variable from which the engine takes the clients' key; set it by secret reference."""

HOST_ADDRESS_VARIABLE = "VLLM_HOST_IP"
"""Address where an engine on several nodes listens: a pod may have several networks, and ZeroMQ needs an address."""

ENGINE_READY_TIMEOUT_S = 14_400
"""Time that the API server waits for the engine core.

vLLM's 600 s is too short for a cold start of a large model (545 to 600 s measured for 120B). The startup probe ends a
hopeless start earlier, after a time that depends on the model's size.
"""

FIXED_VARIABLES = {
    # Serving pods never reach the hub and never report home.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # The image's user may have neither a writable home nor a name, and torch asks for both.
    "HOME": "/tmp",  # noqa: S108 (the pod's own)
    "USER": "vllm",
    "VLLM_ENGINE_READY_TIMEOUT_S": str(ENGINE_READY_TIMEOUT_S),
}

STARTUP_PLAN_ENVIRONMENT = {"VLLM_ENABLE_STARTUP_PLAN": "1"}
"""For engines of one rank with a cache: what memory profiling found is kept beside what was compiled, and used where
the device has as much free memory as then. Each rank decides that for itself, and one that skips the profiling leaves
the others waiting for its part in it (vllm/v1/worker/startup_plan.py, gpu_worker.py)."""

ALLOW_LONG_VARIABLE = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"

_NO_DOWNLOADS = "remove it; serving pods never download, spec.models says where models come from"
_NO_REPORTS = "remove it; the operator turns usage reports off"
_HUB = "use spec.models.hubTokenSecret, which keeps the token out of this object and the engine"
_OWNED = {
    **dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"), _NO_DOWNLOADS),
    **dict.fromkeys(("VLLM_NO_USAGE_STATS", "DO_NOT_TRACK", "VLLM_DO_NOT_TRACK"), _NO_REPORTS),
    **dict.fromkeys(("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"), _HUB),
    "VLLM_CPU_KVCACHE_SPACE": "use spec.accelerator.kvCacheGiB",
    API_KEY_VARIABLE: "use spec.serving.apiKeySecret, which keeps the key out of this object",
    HOST_ADDRESS_VARIABLE: "remove it; engines on several nodes get their pod's address, others need none",
    "VLLM_USE_V2_MODEL_RUNNER": "remove it; the plan counts with the model runner that vLLM itself chooses",
    "VLLM_SERVER_DEV_MODE": "remove it; it opens /sleep, /collective_rpc and more to every client",
}


def environment(settings: EngineSettings) -> dict[str, str]:
    """Return the variables that the operator sets in the engine container, below those of ``spec.engine.env``.

    Left alone, vLLM pins a thread to every core that a container on the CPU sees: every core of the node, since a CPU
    limit is a quota and not a set of cores. The engine would be throttled, beside others pinned to the same cores, and
    two ranks on one NUMA node would not start at all. So threads are counted, not pinned. Users who know the cores of
    a pod, as with the kubelet's static CPU policy, write them into spec.engine.env, a list for each rank: ``0-3|4-7``.
    """
    if settings.group is not None:
        # The leader also waits for the other pods, which may start much later.
        waits_s = max(ENGINE_READY_TIMEOUT_S, settings.group.meeting_timeout_s)
        return FIXED_VARIABLES | {"VLLM_ENGINE_READY_TIMEOUT_S": str(waits_s)}
    if settings.cpu is None:
        return dict(FIXED_VARIABLES)
    ranks = settings.tensor_parallel_size
    return FIXED_VARIABLES | {
        # Per rank (vllm/v1/worker/cpu_worker.py).
        "VLLM_CPU_KVCACHE_SPACE": str(settings.cpu.kv_cache_gib // ranks),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(max(1, settings.cpu.cores // ranks)),
    }


def manifest_variables(env: Iterable[EnvVar]) -> dict[str, Body]:
    """Return the variables of ``spec.engine.env`` as a pod has them, by name."""
    return {variable.name: _in_pod(variable) for variable in env}


def _in_pod(variable: EnvVar) -> Body:
    if variable.value_from is None:
        return {"name": variable.name, "value": variable.value}
    source = variable.value_from.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {"name": variable.name, "valueFrom": source}


def known_values(env: Iterable[EnvVar]) -> dict[str, str | None]:
    """Return the values of ``spec.engine.env`` by name; None for one that only the running container knows."""
    return {variable.name: variable.value if variable.value_from is None else None for variable in env}


def allows_longer(env: Iterable[EnvVar]) -> bool:
    """Test whether vLLM only warns of a max_model_len beyond the model's (config/model.py)."""
    values = [variable.value for variable in env if variable.name == ALLOW_LONG_VARIABLE]
    return bool(values) and values[-1].strip().lower() in {"1", "true"}


def env_problems(env: Iterable[EnvVar]) -> list[Problem]:
    """Return a problem for each variable of ``spec.engine.env`` that the operator owns."""
    return owned_variable_problems([variable.name for variable in env], "spec.engine.env")


def owned_variable_problems(names: Iterable[str], field: str) -> list[Problem]:
    """Return a problem for each variable in a list of a spec that the operator owns."""
    return [Problem(f"{field}[{index}].name", name, _OWNED[name]) for index, name in enumerate(names) if name in _OWNED]
