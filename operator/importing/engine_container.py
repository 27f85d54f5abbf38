"""Convert the engine's container: platform, image, user, environment variables and version defaults."""

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from fractions import Fraction
from typing import Any, Final

from pydantic import ValidationError

from specdecode_operator.api.deployment import Engine, EnvVarSource, Serving
from specdecode_operator.cluster.manifests import variables_in
from specdecode_operator.cluster.nodes import GPU_RESOURCE
from specdecode_operator.deployment.pod_template_merge import ENGINE_USER_ID
from specdecode_operator.enums import Platform
from specdecode_operator.importing.server_arguments import older_variable
from specdecode_operator.importing.server_command import ServerCommand, environment, plain_environment
from specdecode_operator.importing.spec_builder import (
    HOLDS_ANYWAY,
    MigrationError,
    Object,
    Outcome,
    SpecBuilder,
    is_secret_variable,
)
from specdecode_operator.problems import MISSING
from specdecode_operator.sizing.catalogue import find_geometry
from specdecode_operator.sizing.devices import find_device
from specdecode_operator.sizing.errors import GeometryError
from specdecode_operator.sizing.estimate import engine_defaults
from specdecode_operator.sizing.pair import longest_sequence
from specdecode_operator.untrusted import mapping, name_of, objects
from specdecode_operator.vllm.environment import API_KEY_VARIABLE, FIXED_VARIABLES, owned_variable_problems
from specdecode_operator.vllm.extra_args_parser import last_option
from specdecode_operator.vllm.logging_config import LOGGING_CONFIG_PATH, LOGGING_CONFIG_VARIABLE
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS, EngineProfile, UnknownEngineVersionError, find_profile
from specdecode_operator.vllm.versions import split_reference, version_of_image

TOKEN_VARIABLES: Final = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
CACHE_VARIABLES: Final = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE")
_DEVICES: Final = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
_MIRRORS: Final = ("HF_ENDPOINT", "VLLM_USE_MODELSCOPE")
_READ_BY_ENGINE: Final = ("VLLM_", "NCCL_", "CUDA_", "PYTORCH_", "TORCH", "HF_", "OMP_")
_SET_BY_OPERATOR: Final = FIXED_VARIABLES | {LOGGING_CONFIG_VARIABLE: LOGGING_CONFIG_PATH}
_CHANGES: Final = {
    "VLLM_SERVER_DEV_MODE": "the operator does not expose /sleep, /collective_rpc and similar paths: remove it",
    "VLLM_USE_V2_MODEL_RUNNER": "the plan assumes the model runner that vLLM chooses: remove it",
}
"""Variables that the operator sets itself and whose value makes a difference to clients or to the plan."""


def secret_keys(container: Object) -> dict[str, dict[str, str]]:
    """Return the key of the Secret behind each variable that has one."""
    return {
        name_of(each): {"name": name_of(reference), "key": str(reference.get("key"))}
        for each in objects(container, "env")
        if (reference := mapping(mapping(each, "valueFrom"), "secretKeyRef"))
    }


def take_variables(container: Object, command: ServerCommand, builder: SpecBuilder, profile: EngineProfile) -> None:
    """Take variables into ``spec.engine.env``."""
    secrets, values = secret_keys(container), environment(container)
    plain: dict[str, str] = {}
    sources: dict[str, Object] = {}
    # A variable of the start script replaces the container's own.
    given = [each for each in objects(container, "env") if name_of(each) not in command.env]
    given += [{"name": name, "value": value} for name, value in command.env.items() if value is not None]
    for each in given:
        name, value = name_of(each), str(each.get("value") or "")
        what = f"env {name}"
        if _take_named(name, each, secrets, builder) or _take_older(
            name, values | command.env, plain, builder, profile
        ):
            continue
        if name in command.used_variables - command.env.keys() and not name.startswith(_READ_BY_ENGINE):
            builder.own(what, "is part of the arguments")
        elif each.get("valueFrom") is not None:
            _take_source(name, mapping(each, "valueFrom"), name_of(container), sources, builder)
        elif _SET_BY_OPERATOR.get(name) == value:
            builder.own(what, "the operator sets it to the same value")
        else:
            # The kubelet expands only variables defined above, and the one that it names may move elsewhere.
            expands = name not in command.env and not values.keys().isdisjoint(variables_in(value))
            _take_value(name, values[name] if expands else value, plain, builder)
    variables: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in plain.items()]
    variables += [{"name": name, "valueFrom": source} for name, source in sources.items()]
    if variables:
        builder.set("engine.env", variables)


def _take_source(name: str, source: Object, container: str, sources: dict[str, Object], builder: SpecBuilder) -> None:
    taken = deepcopy(source)
    if resource := mapping(taken, "resourceFieldRef"):
        # The engine's own container is the default, and has another name in the engine pod.
        if resource.get("containerName") == container:
            del resource["containerName"]
        if isinstance(resource.get("divisor"), int):
            resource["divisor"] = str(resource["divisor"])
    try:
        valid = EnvVarSource.parse(taken)
    except ValidationError:
        valid = None
    if valid is None or len(valid.model_fields_set) != 1:
        kinds = ", ".join(source) or "empty"
        message = f"has a valueFrom that the field does not support ({kinds}): set it in spec.podTemplate"
        builder.decide("spec.engine.env", name, message)
        return
    sources[name] = taken
    builder.note(Outcome.FIELD, f"env {name}", "spec.engine.env")


def _take_value(name: str, value: str | None, plain: dict[str, str], builder: SpecBuilder) -> None:
    if value is not None and not is_secret_variable(name, value):
        plain[name] = value
        builder.note(Outcome.FIELD, f"env {name}", "spec.engine.env")
        return
    message = "holds a secret as plain text: put it into a Secret, and refer to that with valueFrom"
    if value is None:
        message = "contains a variable with a value only in the running container: set it in spec.podTemplate"
    builder.decide("spec.engine.env", name, message)


def _take_named(name: str, variable: Object, secrets: Object, builder: SpecBuilder) -> bool:
    what = f"env {name}"
    on_cpu = builder.get("accelerator.type") == "CPU"
    if name in {API_KEY_VARIABLE, *TOKEN_VARIABLES}:
        path = "serving.apiKeySecret" if name == API_KEY_VARIABLE else "models.hubTokenSecret"
        # The flag counts before the variable.
        if name in secrets or builder.get(path) is None:
            take_secret(what, name, path, secrets, builder)
        else:
            builder.drop(what, f"spec.{path} comes from another setting, which takes precedence")
    elif name == "VLLM_CPU_KVCACHE_SPACE" and on_cpu:
        text = str(variable.get("value") or "")
        number = int(text) if re.fullmatch(r"\d{1,9}", text) else None
        # The variable is per rank, the field is not.
        ranks = builder.get("parallelism.tensor") or 1
        builder.take(what, "accelerator.kvCacheGiB", text if number is None else number * ranks)
    elif name in ("VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS") and on_cpu:
        builder.own(what, "the operator derives the threads from spec.accelerator.cpuCores")
    elif name in {*CACHE_VARIABLES, "HF_HUB_ENABLE_HF_TRANSFER"}:
        builder.own(what, "each pod stores its models in its own folder or on a claim")
    elif name in _DEVICES:
        builder.drop(what, "each pod gets as many GPUs as the server uses")
    elif name in _MIRRORS and builder.get("models.volume") is None:
        message = (
            "only the operator downloads from the hub: put the models on a volume, spec.models.volume, or remove it"
        )
        builder.decide("spec.models", what, message)
    elif name in _CHANGES and str(variable.get("value") or "").lower() not in ("", "0", "false"):
        builder.decide("spec.engine.env", what, _CHANGES[name])
    elif problems := owned_variable_problems([name], "env"):
        builder.own(what, problems[0].message.removeprefix("remove it; "))
    else:
        return False
    return True


def _take_older(
    name: str, values: Mapping[str, str | None], plain: dict[str, str], builder: SpecBuilder, profile: EngineProfile
) -> bool:
    older = older_variable(name, profile.version, profile.variables)
    if older is None:
        return False
    what, value = f"env {name}", (values.get(name) or "").removesuffix("_VLLM_V1")
    now, *given = older.said_now([value]) or [""]
    flag, extra = now.partition(".")[0], builder.get("engine.extraArgs") or []
    if older.gone:
        builder.drop(what, older.gone)
    elif value in older.default:
        builder.own(what, HOLDS_ANYWAY)
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


def take_secret(what: str, variable: str | None, path: str, secrets: Object, builder: SpecBuilder) -> None:
    """Take the Secret behind a variable to its field, or ask for one; the value is never shown."""
    if variable is not None and variable in secrets:
        builder.take(what, path, secrets[variable])
    else:
        message = "must not be in the object: put it into a Secret and refer to that here, as {name, key}"
        builder.decide(f"spec.{path}", f"the value of {what.removeprefix('env ')}", message)


_ACCELERATOR: Final = re.compile(r"(nvidia|amd|habana\.ai|intel|aws\.amazon|google|huawei)\b.*/|.*/(gpu|tpu|npu|gaudi)")
_NETWORK: Final = re.compile(r".*(rdma|hostdev|efa|sriov|infiniband)", re.IGNORECASE)
_CORES: Final = {"": Fraction(1), "m": Fraction(1, 1000)}
_UNIT_GIB: Final = {
    "": Fraction(1, 2**30),
    **{unit: Fraction(1000**power, 2**30) for power, unit in enumerate("kMGT", 1)},
    **{f"{unit}i": Fraction(1024**power, 2**30) for power, unit in enumerate("KMGT", 1)},
}

_NEWEST: Final = KNOWN_VERSIONS[-1]


def find_platform(
    container: Object, where: str, env: Mapping[str, str | None], *, says_gpus: bool = True
) -> tuple[Platform, int]:
    """Return the platform of the server and its number of GPUs, 0 if its source does not state it.

    ``env`` are the variables that its own command sets. Raises MigrationError for hardware that cannot be planned.
    """
    amounts = _amounts(container)
    place = f"{where}.resources.limits"
    for name, amount in amounts.items():
        if name != GPU_RESOURCE and _ACCELERATOR.match(name) and not _NETWORK.match(name):
            fix = f"only whole NVIDIA GPUs ({GPU_RESOURCE}) and CPUs are supported: keep this Deployment"
            raise MigrationError(f"{place}.{name}", str(amount), fix)
    gpus = str(amounts.get(GPU_RESOURCE, "0"))
    if not re.fullmatch(r"\d{1,6}", gpus):
        raise MigrationError(f"{place}.{GPU_RESOURCE}", gpus, "must be a whole number of GPUs, such as 8")
    if int(gpus) > 0:
        return Platform.GPU, int(gpus)
    names, image = {*plain_environment(container), *env}, str(container.get("image") or "").lower()
    if "cpu" in image or any(name.startswith("VLLM_CPU_") for name in names):
        return Platform.CPU, 0
    if not says_gpus:
        return Platform.GPU, 0
    fix = "set the number of GPUs of the server (an image or variables for CPU identify a server without GPUs)"
    raise MigrationError(f"{place}.{GPU_RESOURCE}", MISSING, fix)


def take_cpu(container: Object, builder: SpecBuilder) -> None:
    """Take cores and memory of a server without GPUs; ask for those that are missing."""
    amounts = _amounts(container)
    builder.set("accelerator.type", "CPU")
    for field, resource, units in (("cpuCores", "cpu", _CORES), ("memoryGiB", "memory", _UNIT_GIB)):
        match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)([a-zA-Z]{0,2})", str(amounts.get(resource)))
        if match is None or match[2] not in units:
            builder.decide(f"spec.accelerator.{field}", MISSING, f"set the {resource} of one replica")
        else:
            value = max(1, math.floor(Fraction(match[1]) * units[match[2]]))
            builder.take(f"resources {resource} {amounts[resource]}", f"accelerator.{field}", value)
    if "VLLM_CPU_KVCACHE_SPACE" not in plain_environment(container):
        builder.decide("spec.accelerator.kvCacheGiB", MISSING, "set how many GiB of the memory are KV cache")


def take_image(image: str, platform: Platform, wanted: str | None, builder: SpecBuilder) -> EngineProfile:
    """Put image and version into the spec; return the profile for the arguments.

    ``wanted`` is the version that the user gave, for images whose tag does not tell; MigrationError if it is unknown.
    """
    repository, tag = split_reference(image)
    version = wanted or version_of_image(image)
    if not image and version is None:
        builder.note(Outcome.DEFAULT, "image (not set)", f"vLLM {_NEWEST}; choose another with --engine-version")
        return find_profile(_NEWEST)
    if version is None:
        fix = f"does not contain the version of vLLM: set --engine-version, such as {_NEWEST}"
        builder.decide("spec.engine.version", tag or image or MISSING, fix)
        builder.set("engine.image", image)
        return find_profile(_NEWEST)
    try:
        profile = find_profile(version)
    except UnknownEngineVersionError as error:
        if wanted:
            raise MigrationError("--engine-version", wanted, error.problem.message) from error
        profile = find_profile(_NEWEST)
        if repository.endswith("vllm/vllm-openai") and platform in profile.images:
            reason = f"the operator no longer supports vLLM {version}: {profile.images[platform]} replaces it"
            builder.drop(f"image {image}", f"{reason}; compare answers and speed before you move traffic")
        else:
            fix = f"contains vLLM {version}, which the operator no longer supports: name an image of {_NEWEST}"
            builder.decide("spec.engine.image", image, fix)
        return profile
    own = profile.images.get(platform)
    if not image:
        builder.set("engine.version", version)
    elif own is not None and image.removeprefix("docker.io/") == own.removeprefix("docker.io/"):
        builder.own(f"image {image}", f"is the operator's default image of vLLM {version}")
        if version != Engine().version:
            builder.set("engine.version", version)
    else:
        builder.take(f"image {image}", "engine.version", version)
        builder.set("engine.image", image)
    if not profile.tested:
        newer = (
            f"is newer than the versions that the operator supports: treated as {profile.known_as}, with more margin"
        )
        builder.note(Outcome.DEFAULT, f"vLLM {version}", newer)
    return profile


def note_defaults(builder: SpecBuilder, platform: Platform) -> None:
    """Report the defaults of the old engine that differ from the operator's, for settings that were not given."""
    version = builder.get("engine.version") or Engine().version
    for field, (theirs, written) in differing_defaults(builder, platform).items():
        product = (builder.get("accelerator.products") or [""])[0]
        where = f"on {product}" if find_device(product) else "on GPUs of 70 GiB and more"
        result = f"{written}; vLLM {version} defaults to {theirs} {where}: set the field to keep that"
        builder.note(Outcome.DEFAULT, f"spec.{field} (not set)", result)


def differing_defaults(builder: SpecBuilder, platform: Platform) -> dict[str, tuple[int, int]]:
    """Return the defaults of vLLM and of the operator by field, for settings that were not given and differ."""
    if platform is Platform.CPU:
        # It has other defaults, and no share of memory.
        return {}
    version = builder.get("engine.version") or Engine().version
    device = find_device((builder.get("accelerator.products") or [""])[0])
    engine, ours = engine_defaults(version, device), Serving()
    compared = {
        "maxNumSeqs": (engine.max_num_seqs, ours.max_num_seqs),
        "maxNumBatchedTokens": (engine.max_num_batched_tokens, ours.max_num_batched_tokens),
        "gpuMemoryUtilizationPercent": (engine.utilization_percent, ours.gpu_memory_utilization_percent),
        "blockSize": (engine.block_size, find_profile(version).default_block_sizes[platform]),
    }
    return {
        f"serving.{field}": (theirs, written)
        for field, (theirs, written) in compared.items()
        if builder.get(f"serving.{field}") is None and theirs != written
    }


def take_whole_prompts(builder: SpecBuilder, profile: EngineProfile) -> None:
    """Set the batched tokens that vLLM derives without chunked prefill (vllm/engine/arg_utils.py)."""
    option = last_option("--enable-chunked-prefill", builder.get("engine.extraArgs") or [], profile)
    field = "serving.maxNumBatchedTokens"
    if option is None or not option.negated or builder.get(field) is not None:
        return
    length = builder.get("serving.maxModelLen")
    with suppress(GeometryError):
        geometry = find_geometry(str(builder.get("target.model")))
        length = longest_sequence(geometry, profile.version) if length is None and geometry else length
    if not isinstance(length, int):
        message = "without chunked prefill vLLM uses the longest request of the model: write that number of tokens"
        builder.decide(f"spec.{field}", MISSING, message)
        return
    products = builder.get("accelerator.products") or [""]
    usual = engine_defaults(profile.version, find_device(products[0])).max_num_batched_tokens
    remark = "without chunked prefill vLLM uses the longest request"
    builder.take("--max-num-batched-tokens (absent)", field, max(length, usual), remark)


def note_user(builder: SpecBuilder) -> None:
    """Report that engines do not run as root, if the pod left its user to the image."""
    template = builder.get("podTemplate.spec") or {}
    contexts = [mapping(each, "securityContext") for each in (template, *objects(template, "containers"))]
    if not any(context.keys() & {"runAsUser", "runAsNonRoot"} for context in contexts):
        keep = "{runAsNonRoot: false} in spec.podTemplate.spec.securityContext keeps the image's"
        result = f"user {ENGINE_USER_ID} instead of the user of the image, which is root in vLLM's images: {keep}"
        builder.note(Outcome.DEFAULT, "securityContext.runAsUser (not set)", result)


def _amounts(container: Object) -> dict[str, Any]:
    resources = mapping(container, "resources")
    return {**mapping(resources, "requests"), **mapping(resources, "limits")}
