"""Takes the environment of an engine to its places."""

import re
from collections.abc import Mapping
from typing import Any, Final

from specdecode_operator.engine.environment import API_KEY_VARIABLE, FIXED_VARIABLES, owned_variable_problems
from specdecode_operator.engine.logging_config import LOGGING_CONFIG_PATH, LOGGING_CONFIG_VARIABLE
from specdecode_operator.engine.profiles import EngineProfile
from specdecode_operator.kube.untyped import mapping, name_of, objects
from specdecode_operator.migration.builder import HOLDS_ANYWAY, Outcome, SpecBuilder
from specdecode_operator.migration.older_settings import older_variable
from specdecode_operator.migration.secrets import is_secret_variable
from specdecode_operator.migration.server_command import ServerCommand, environment, variables_in

TOKEN_VARIABLES: Final = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
CACHE_VARIABLES: Final = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE")
_DEVICES: Final = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
_MIRRORS: Final = ("HF_ENDPOINT", "VLLM_USE_MODELSCOPE")
_READ_BY_ENGINE: Final = ("VLLM_", "NCCL_", "CUDA_", "PYTORCH_", "TORCH", "HF_", "OMP_")
_SET_BY_OPERATOR: Final = FIXED_VARIABLES | {LOGGING_CONFIG_VARIABLE: LOGGING_CONFIG_PATH}
_CHANGES: Final = {
    "VLLM_SERVER_DEV_MODE": "the operator keeps /sleep, /collective_rpc and more closed to clients: remove it",
    "VLLM_USE_V2_MODEL_RUNNER": "the plan counts with the model runner that vLLM itself chooses: remove it",
}
"""Variables that the operator owns and that make another server of it."""

_OFF: Final = ("", "0", "false")
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
    container: Mapping[str, Any], command: ServerCommand, builder: SpecBuilder, profile: EngineProfile
) -> list[dict[str, Any]]:
    """Take plain variables into ``spec.engine.env``; return those that only a podTemplate can hold."""
    secrets = secret_keys(container)
    values = environment(container)
    plain: dict[str, str] = {}
    overlay: list[dict[str, Any]] = []
    for each in _given(container, command):
        name = name_of(each)
        if _take_named(name, each, secrets, builder) or _take_older(
            name, values | command.env, plain, builder, profile
        ):
            continue
        # The value is part of the arguments by now.
        if name in command.used_variables - command.env.keys() and not name.startswith(_READ_BY_ENGINE):
            builder.note(Outcome.OPERATOR, f"env {name}", "is part of the arguments")
            continue
        if "valueFrom" in each:
            builder.note(Outcome.POD, f"env {name}", "spec.podTemplate.spec.containers[engine].env")
            overlay.append(each)
        elif _SET_BY_OPERATOR.get(name) != (value := str(each.get("value") or "")):
            if name not in command.env and not values.keys().isdisjoint(variables_in(value)):
                if values[name] is None:
                    message = "holds a variable that only the running container knows: set it in spec.podTemplate"
                    builder.decide("spec.engine.env", name, message)
                    continue
                # The kubelet knows a variable only below the one it names, and that one may go elsewhere.
                value = values[name] or ""
            if is_secret_variable(name, value):
                message = (
                    "holds a secret as plain text: put it into a Secret, and name that by valueFrom in podTemplate"
                )
                builder.decide("spec.engine.env", name, message)
                continue
            plain[name] = value
            builder.note(Outcome.FIELD, f"env {name}", "spec.engine.env")
        else:
            builder.note(Outcome.OPERATOR, f"env {name}", "the operator sets it so")
    if plain:
        builder.set("engine.env", [{"name": name, "value": value} for name, value in plain.items()])
    return overlay


def _given(container: Mapping[str, Any], command: ServerCommand) -> list[dict[str, Any]]:
    """Return all variables: what a start script sets takes the place of the container's own."""
    kept = [each for each in objects(container, "env") if name_of(each) not in command.env]
    script = [{"name": name, "value": value} for name, value in command.env.items() if value is not None]
    return [*kept, *script]


def _take_named(name: str, variable: Mapping[str, Any], secrets: Mapping[str, Any], builder: SpecBuilder) -> bool:
    """Take a variable that has a field, or no place any more; return whether it is one."""
    what = f"env {name}"
    on_cpu = builder.get("accelerator.type") == "CPU"
    if name in {API_KEY_VARIABLE, *TOKEN_VARIABLES}:
        path = "serving.apiKeySecret" if name == API_KEY_VARIABLE else "models.hubTokenSecret"
        # The flag counts before the variable.
        if name in secrets or builder.get(path) is None:
            take_secret(what, name, path, secrets, builder)
        else:
            builder.drop(what, f"spec.{path} is taken from elsewhere, which counts before it")
    elif name == "VLLM_CPU_KVCACHE_SPACE" and on_cpu:
        text = str(variable.get("value") or "")
        number = int(text) if re.fullmatch(r"\d{1,9}", text) else None
        # What the variable says is each rank's.
        ranks = builder.get("parallelism.tensor") or 1
        builder.take(what, "accelerator.kvCacheGiB", text if number is None else number * ranks)
    elif name in _OF_CPU and on_cpu:
        builder.note(Outcome.OPERATOR, what, "the operator counts threads by spec.accelerator.cpuCores")
    elif name in {*CACHE_VARIABLES, "HF_HUB_ENABLE_HF_TRANSFER"}:
        builder.note(Outcome.OPERATOR, what, "a pod has its models in a folder of its own, or on a claim")
    elif name in _DEVICES:
        builder.drop(what, "a pod is given its own GPUs, as many as the server spreads over")
    elif name in _MIRRORS and builder.get("models.volume") is None:
        message = (
            "the operator downloads from the hub itself: put the models on a volume, spec.models.volume, or remove it"
        )
        builder.decide("spec.models", what, message)
    elif name in _CHANGES and str(variable.get("value") or "").lower() not in _OFF:
        builder.decide("spec.engine.env", what, _CHANGES[name])
    elif problems := owned_variable_problems([name], "env"):
        builder.note(Outcome.OPERATOR, what, problems[0].message.removeprefix("remove it; "))
    else:
        return False
    return True


def _take_older(
    name: str, values: Mapping[str, str | None], plain: dict[str, str], builder: SpecBuilder, profile: EngineProfile
) -> bool:
    """Take a variable that the version does not read to what says the same now, or ask; return whether it is one."""
    older = older_variable(name, profile.version, profile.variables)
    if older is None:
        return False
    what, value = f"env {name}", (values.get(name) or "").removesuffix("_VLLM_V1")
    now, *given = older.said_now([value]) or [""]
    flag, extra = now.partition(".")[0], builder.get("engine.extraArgs") or []
    if older.gone:
        builder.drop(what, older.gone)
    elif value in older.default:
        builder.note(Outcome.OPERATOR, what, HOLDS_ANYWAY)
    elif values.get(name) is not None and now in profile.variables:
        plain[now] = value
        builder.note(Outcome.FIELD, what, f"spec.engine.env: {now}, as vLLM {profile.version} calls it")
    elif values.get(name) is None or flag not in profile.flags or any(each.startswith(flag) for each in extra):
        message = older.ask or f"vLLM {profile.version} has {now or flag} for it: write that, and remove it"
        builder.decide("spec.engine.env", what, message)
    else:
        builder.set("engine.extraArgs", [*extra, now, *given])
        builder.note(Outcome.EXTRA, what, " ".join((now, *given)))
    return True


def take_secret(what: str, variable: str | None, path: str, secrets: Mapping[str, Any], builder: SpecBuilder) -> None:
    """Take the Secret behind a variable to its field, or ask for one: the value itself is never shown."""
    if variable is not None and variable in secrets:
        builder.take(what, path, secrets[variable])
    else:
        message = "must not stand in an object: put it into a Secret and name that here, {name, key}"
        builder.decide(f"spec.{path}", f"the value of {what.removeprefix('env ')}", message)
