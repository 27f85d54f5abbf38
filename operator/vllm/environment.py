"""Build the engine container's environment, and reject variables that the operator sets."""

from collections.abc import Iterable

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import EnvVar
from specdecode_operator.problems import Problem
from specdecode_operator.vllm.settings import EngineSettings

API_KEY_VARIABLE = "VLLM_API_KEY"
"""Variable from which the engine takes the clients' key; set it by secret reference."""

HOST_ADDRESS_VARIABLE = "VLLM_HOST_IP"
"""Address at which an engine on several nodes listens. A pod may have several networks, and ZeroMQ needs one address.
"""

LIVE_FOLDER_VARIABLE = "SPECDECODE_LIVE_DIR"
"""Folder of the sockets on which a recorder for live captures listens."""

LIVE_TOKEN_IDS_VARIABLE = "SPECDECODE_LIVE_TOKEN_IDS"  # noqa: S105  no password
"""Token ids that such a recorder may hand out (`LiveTokenIds`)."""

ENGINE_READY_TIMEOUT_S = 14_400
"""Time that the API server waits for the engine core.

vLLM's 600 s is too short for a cold start of a large model (545 to 600 s measured for 120B). The startup probe ends a
hopeless start earlier, after a time that depends on the model's size.
"""

FIXED_VARIABLES = {
    # Serving pods never download from the hub, and send no usage reports.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # The image's user may have no writable home and no name, but torch needs both.
    "HOME": "/tmp",  # noqa: S108 (the pod's own)
    "USER": "vllm",
    "VLLM_ENGINE_READY_TIMEOUT_S": str(ENGINE_READY_TIMEOUT_S),
}

STARTUP_PLAN_ENVIRONMENT = {"VLLM_ENABLE_STARTUP_PLAN": "1"}
"""Reuses the result of memory profiling, for engines of one rank with a compile cache. vLLM stores it with the
compiled code, and reuses it if the device has as much free memory. Engines of several ranks profile every time: each
rank decides alone, and a rank that skips profiling blocks the others in a collective operation
(vllm/v1/worker/startup_plan.py, gpu_worker.py).
"""

ALLOW_LONG_VARIABLE = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"

_NO_DOWNLOADS = "remove it; serving pods never download, use spec.models to choose the source of models"
_NO_REPORTS = "remove it; the operator turns usage reports off"
_HUB = "use spec.models.hubTokenSecret, which keeps the token out of this object and the engine"
_OWNED = {
    **dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"), _NO_DOWNLOADS),
    **dict.fromkeys(("VLLM_NO_USAGE_STATS", "DO_NOT_TRACK", "VLLM_DO_NOT_TRACK"), _NO_REPORTS),
    **dict.fromkeys(("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"), _HUB),
    "VLLM_CPU_KVCACHE_SPACE": "use spec.accelerator.kvCacheGiB",
    API_KEY_VARIABLE: "use spec.serving.apiKeySecret, which keeps the key out of this object",
    HOST_ADDRESS_VARIABLE: "remove it; the operator sets the pod's address for engines on several nodes",
    LIVE_FOLDER_VARIABLE: "remove it; use spec.engine.recorder",
    LIVE_TOKEN_IDS_VARIABLE: "remove it; only the operator's administrator allows token ids, with --allow-token-ids",
    "VLLM_USE_V2_MODEL_RUNNER": "remove it; the plan assumes the model runner that vLLM chooses by default",
    "VLLM_SERVER_DEV_MODE": "remove it; it opens /sleep, /collective_rpc and more to every client",
}


def environment(settings: EngineSettings) -> dict[str, str]:
    """Return the variables that the operator sets in the engine container; ``spec.engine.env`` overrides them.

    By default, vLLM on the CPU pins a thread to each core that the container sees. A CPU limit is a quota and not a set
    of cores, so these are all cores of the node: the engine would be throttled, would share cores with other pinned
    engines, and two ranks on one NUMA node would not start. The operator therefore sets the number of threads and does
    not pin them. Users who know the cores of a pod, such as with the kubelet's static CPU policy, set them in
    spec.engine.env as a list per rank: ``0-3|4-7``.
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
    """Return the variables of ``spec.engine.env`` as they are in a pod's manifest, by name."""
    return {variable.name: _in_pod(variable) for variable in env}


def _in_pod(variable: EnvVar) -> Body:
    if variable.value_from is None:
        return {"name": variable.name, "value": variable.value}
    source = variable.value_from.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {"name": variable.name, "valueFrom": source}


def known_values(env: Iterable[EnvVar]) -> dict[str, str | None]:
    """Return the values of ``spec.engine.env`` by name; None for a value that only the running container has."""
    return {variable.name: variable.value if variable.value_from is None else None for variable in env}


def allows_longer(env: Iterable[EnvVar]) -> bool:
    """Test whether vLLM only warns about a max_model_len beyond the model's (config/model.py)."""
    values = [variable.value for variable in env if variable.name == ALLOW_LONG_VARIABLE]
    return bool(values) and values[-1].strip().lower() in {"1", "true"}


def env_problems(env: Iterable[EnvVar]) -> list[Problem]:
    """Return a problem for each variable of ``spec.engine.env`` that only the operator may set."""
    return owned_variable_problems([variable.name for variable in env], "spec.engine.env")


def owned_variable_problems(names: Iterable[str], field: str) -> list[Problem]:
    """Return a problem for each of these variables that only the operator may set."""
    return [Problem(f"{field}[{index}].name", name, _OWNED[name]) for index, name in enumerate(names) if name in _OWNED]
