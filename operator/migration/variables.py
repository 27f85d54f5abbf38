"""Takes the environment of an engine to its places."""

from collections.abc import Mapping
from typing import Any, Final

from specdecode_operator.engine.environment import API_KEY_VARIABLE, environment, owned_variable_problems
from specdecode_operator.engine.logging_config import LOGGING_CONFIG_PATH, LOGGING_CONFIG_VARIABLE
from specdecode_operator.engine.settings import CpuSettings, EngineSettings
from specdecode_operator.kube.untyped import mapping, name_of, objects
from specdecode_operator.migration.ledger import Fate, Ledger

_TOKENS: Final = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_CACHES: Final = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE", "HF_HUB_ENABLE_HF_TRANSFER")
_GONE: Final = {
    "VLLM_USE_V1": "there is only one engine now",
    "VLLM_ATTENTION_BACKEND": "vLLM has the flag --attention-backend for it now: use spec.engine.extraArgs",
}
_READ_BY_ENGINE: Final = ("VLLM_", "NCCL_", "CUDA_", "PYTORCH_", "TORCH", "HF_", "OMP_")
_OF_CPU: Final = ("VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS")


def secret_keys(container: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return the key of the Secret behind each variable that has one."""
    references = {
        name_of(each): mapping(mapping(each, "valueFrom"), "secretKeyRef") for each in objects(container, "env")
    }
    return {
        name: {"name": name_of(reference), "key": str(reference.get("key"))}
        for name, reference in references.items()
        if reference
    }


def take_variables(
    container: Mapping[str, Any], script: Mapping[str, str], used: set[str], ledger: Ledger
) -> list[dict[str, Any]]:
    """Take plain variables into ``spec.engine.env``; return those that only a podTemplate can hold.

    ``script`` are variables that a start script sets, ``used`` those of the
    command line, which are part of the arguments by now.
    """
    secrets, own = secret_keys(container), _own(ledger)
    plain: dict[str, str] = {}
    overlay: list[dict[str, Any]] = []
    for each in objects(container, "env"):
        name = name_of(each)
        if _take_named(name, each, secrets, ledger):
            continue
        if name in used and not name.startswith(_READ_BY_ENGINE):
            ledger.note(Fate.OPERATOR, f"env {name}", "is part of the arguments")
            continue
        if "valueFrom" in each:
            ledger.note(Fate.POD, f"env {name}", "spec.podTemplate.spec.containers[engine].env")
            overlay.append(each)
        else:
            plain[name] = str(each.get("value") or "")
    for name, value in {**plain, **script}.items():
        if own.get(name) == value:
            plain.pop(name, None)
        else:
            plain[name] = value
            ledger.note(Fate.FIELD, f"env {name}", "spec.engine.env")
    if plain:
        ledger.put("engine.env", [{"name": name, "value": value} for name, value in plain.items()])
    return overlay


def _take_named(name: str, variable: Mapping[str, Any], secrets: Mapping[str, Any], ledger: Ledger) -> bool:
    """Take a variable that has a field, or no place any more; return whether it is one."""
    what = f"env {name}"
    on_cpu = ledger.get("accelerator.type") == "CPU"
    if name == API_KEY_VARIABLE:
        _take_secret(name, "serving.apiKeySecret", secrets, ledger)
    elif name in _TOKENS:
        _take_secret(name, "models.hubTokenSecret", secrets, ledger)
    elif name == "VLLM_CPU_KVCACHE_SPACE" and on_cpu:
        text = str(variable.get("value") or "")
        # What the variable says is each rank's.
        ranks = ledger.get("parallelism.tensor") or 1
        ledger.take(what, "accelerator.kvCacheGiB", int(text) * ranks if text.isdecimal() else text)
    elif name in _OF_CPU and on_cpu:
        ledger.note(Fate.OPERATOR, what, "the operator counts threads by spec.accelerator.cpuCores")
    elif name in _CACHES:
        ledger.note(Fate.OPERATOR, what, "a pod fetches its models into a folder of its own, or has them on a claim")
    elif name in _GONE:
        ledger.lose(what, _GONE[name])
    elif problems := owned_variable_problems([name], "env"):
        ledger.note(Fate.OPERATOR, what, problems[0].message.removeprefix("remove it; "))
    else:
        return False
    return True


def _take_secret(name: str, path: str, secrets: Mapping[str, Any], ledger: Ledger) -> None:
    if name in secrets:
        ledger.take(f"env {name}", path, secrets[name])
    elif ledger.get(path) is None:
        message = "stands in the Deployment as plain text: put it into a Secret and name that here, {name, key}"
        ledger.decide(f"spec.{path}", f"the value of {name}", message)


def _own(ledger: Ledger) -> dict[str, str]:
    """Variables that the operator sets by itself, with their values."""
    accelerator = ledger.get("accelerator") or {}
    on_cpu = accelerator.get("type") == "CPU"
    settings = EngineSettings(
        model="",
        served_model_names=(),
        max_model_len=1,
        max_num_seqs=1,
        max_num_batched_tokens=1,
        kv_cache_dtype="auto",
        block_size=1,
        memory_utilization_percent=1,
        tensor_parallel_size=1,
        port=1,
        shutdown_timeout_s=1,
        cpu=CpuSettings(1, 1) if on_cpu else None,
    )
    return environment(settings) | {LOGGING_CONFIG_VARIABLE: LOGGING_CONFIG_PATH}
