"""The engine that a Deployment runs: on what, which vLLM, and what it leaves to the engine's own defaults."""

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from specdecode_operator.api.deployment import Engine, Serving
from specdecode_operator.deployment.objects.pod_user import ENGINE_USER_ID
from specdecode_operator.engine.image_version import split_reference, version_of_image
from specdecode_operator.engine.profiles import KNOWN_VERSIONS, EngineProfile, UnknownEngineVersionError, find_profile
from specdecode_operator.engine.rules.extra_args import last_option
from specdecode_operator.engine.settings import Platform
from specdecode_operator.estimate.estimate import engine_defaults
from specdecode_operator.kube.nodes import GPU_RESOURCE
from specdecode_operator.kube.untyped import mapping, objects
from specdecode_operator.migration.builder import MigrationError, Outcome, SpecBuilder
from specdecode_operator.migration.server_command import plain_environment
from specdecode_operator.problems import MISSING
from specdecode_operator.sizing.base.devices import find_device
from specdecode_operator.sizing.base.errors import GeometryError
from specdecode_operator.sizing.families.catalogue import find_geometry
from specdecode_operator.sizing.pair.pair import longest_sequence

_ACCELERATOR: Final = re.compile(r"(nvidia|amd|habana\.ai|intel|aws\.amazon|google|huawei)\b.*/|.*/(gpu|tpu|npu|gaudi)")
_NETWORK: Final = re.compile(r".*(rdma|hostdev|efa|sriov|infiniband)", re.IGNORECASE)
_UNIT_BYTES: Final = {
    "": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
}  # fmt: skip

_OFFICIAL: Final = ("vllm/vllm-openai",)
_NEWEST: Final = KNOWN_VERSIONS[-1]


def find_platform(
    container: Mapping[str, Any], where: str, env: Mapping[str, str | None], *, says_gpus: bool = True
) -> tuple[Platform, int]:
    """Return what the server computes on, and how many GPUs; none where its source does not say it.

    ``env`` are the variables that its own command sets.

    Raises
    ------
    MigrationError
        When it is something that the operator cannot plan for.
    """
    amounts = _amounts(container)
    place = f"{where}.resources.limits"
    for name, amount in amounts.items():
        if name != GPU_RESOURCE and _ACCELERATOR.match(name) and not _NETWORK.match(name):
            fix = f"only whole NVIDIA GPUs ({GPU_RESOURCE}) and CPUs are planned for: keep this Deployment as it is"
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
    fix = "say how many GPUs the server has (an image or variables for CPU would tell of one without)"
    raise MigrationError(f"{place}.{GPU_RESOURCE}", MISSING, fix)


def take_cpu(container: Mapping[str, Any], builder: SpecBuilder) -> None:
    """Take cores and memory of a server without GPUs; what is missing must be decided."""
    amounts = _amounts(container)
    builder.set("accelerator.type", "CPU")
    cores, memory = _cores(amounts.get("cpu")), _gib(amounts.get("memory"))
    for field, resource, value in (("cpuCores", "cpu", cores), ("memoryGiB", "memory", memory)):
        if value is None:
            builder.decide(f"spec.accelerator.{field}", MISSING, f"say how much {resource} a replica has")
        else:
            builder.take(f"resources {resource} {amounts[resource]}", f"accelerator.{field}", value)
    if "VLLM_CPU_KVCACHE_SPACE" not in plain_environment(container):
        builder.decide("spec.accelerator.kvCacheGiB", MISSING, "say how many GiB of the memory are KV cache")


def take_image(image: str, platform: Platform, wanted: str | None, builder: SpecBuilder) -> EngineProfile:
    """Put image and version into the spec; return the profile that the arguments are read with.

    ``wanted`` is the version that the user gave, for images that do not tell.

    Raises
    ------
    MigrationError
        When the version that the user gave is none.
    """
    repository, tag = split_reference(image)
    version = wanted or version_of_image(image)
    if not image and version is None:
        builder.note(Outcome.DEFAULT, "image (not said)", f"vLLM {_NEWEST}: --engine-version takes another")
        return find_profile(_NEWEST)
    if version is None:
        fix = f"does not tell the version of vLLM: give --engine-version, such as {_NEWEST}"
        builder.decide("spec.engine.version", tag or image or MISSING, fix)
        builder.set("engine.image", image)
        return find_profile(_NEWEST)
    try:
        profile = find_profile(version)
    except UnknownEngineVersionError as error:
        if wanted:
            raise MigrationError("--engine-version", wanted, error.problem.message) from error
        return _newer(image, repository, version, platform, builder)
    if not image:
        builder.set("engine.version", version)
    elif _same(image, profile.images.get(platform)):
        builder.note(Outcome.OPERATOR, f"image {image}", f"is the operator's own image of vLLM {version}")
        if version != Engine().version:
            builder.set("engine.version", version)
    else:
        builder.take(f"image {image}", "engine.version", version)
        builder.set("engine.image", image)
    if not profile.tested:
        newer = f"is newer than all that the operator knows: launched and sized as {profile.known_as}, with more margin"
        builder.note(Outcome.DEFAULT, f"vLLM {version}", newer)
    return profile


def note_defaults(builder: SpecBuilder, platform: Platform) -> None:
    """Say of each setting that the Deployment left to the engine what the engine took, where that changes."""
    version = builder.get("engine.version") or Engine().version
    products = builder.get("accelerator.product") or [""]
    engine = engine_defaults(version, find_device(products[0]))
    ours = Serving()
    profile = find_profile(version)
    compared = {
        "maxNumSeqs": (engine.max_num_seqs, ours.max_num_seqs),
        "maxNumBatchedTokens": (engine.max_num_batched_tokens, ours.max_num_batched_tokens),
        "memoryUtilizationPercent": (engine.utilization_percent, ours.memory_utilization_percent),
        "blockSize": (engine.block_size, profile.default_block_sizes[platform]),
    }
    if platform is Platform.CPU:
        # Other defaults hold there, and the share of memory has no meaning.
        compared = {}
    for field, (theirs, written) in compared.items():
        path = f"serving.{field}"
        if builder.get(path) is None and theirs != written:
            where = f"on {products[0]}" if find_device(products[0]) else "on GPUs of 70 GiB and more"
            result = f"{written}; vLLM {version} takes {theirs} {where}: set the field to keep that"
            builder.note(Outcome.DEFAULT, f"spec.{path} (not said)", result)


def take_whole_prompts(builder: SpecBuilder, profile: EngineProfile) -> None:
    """Set the batched tokens that vLLM derives if prompts are not cut into chunks and no flag says the tokens.

    Source: vllm/engine/arg_utils.py, _set_default_max_num_seqs_and_batched_tokens_args.
    """
    option = last_option("--enable-chunked-prefill", builder.get("engine.extraArgs") or [], profile)
    field = "serving.maxNumBatchedTokens"
    if option is None or not option.negated or builder.get(field) is not None:
        return
    length = builder.get("serving.maxModelLen")
    model = builder.get("target.model")
    with suppress(GeometryError):
        geometry = find_geometry(str(model))
        length = longest_sequence(geometry, profile.version) if length is None and geometry else length
    if not isinstance(length, int):
        message = "without chunked prefill vLLM takes the longest request of the model: write that number of tokens"
        builder.decide(f"spec.{field}", MISSING, message)
        return
    products = builder.get("accelerator.product") or [""]
    usual = engine_defaults(profile.version, find_device(products[0])).max_num_batched_tokens
    remark = "without chunked prefill vLLM takes the longest request"
    builder.take("--max-num-batched-tokens (absent)", field, max(length, usual), remark)


def note_user(builder: SpecBuilder) -> None:
    """Say that engines are not root any more, where the pod left its user to the image."""
    template = builder.get("podTemplate.spec") or {}
    contexts = [mapping(each, "securityContext") for each in (template, *objects(template, "containers"))]
    if not any(context.keys() & {"runAsUser", "runAsNonRoot"} for context in contexts):
        keep = "{runAsNonRoot: false} in spec.podTemplate.spec.securityContext keeps the image's"
        result = f"user {ENGINE_USER_ID} in the place of the image's, which is root in vLLM's: {keep}"
        builder.note(Outcome.DEFAULT, "securityContext.runAsUser (not said)", result)


def _amounts(container: Mapping[str, Any]) -> dict[str, Any]:
    """Requests, and limits above them."""
    resources = mapping(container, "resources")
    return {**mapping(resources, "requests"), **mapping(resources, "limits")}


def _cores(amount: Any) -> int | None:
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)(m?)", str(amount))
    return max(1, math.floor(float(match[1]) / (1000 if match[2] else 1))) if match else None


def _gib(amount: Any) -> int | None:
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)([kMGT]?i?)", str(amount))
    if match is None or match[2] not in _UNIT_BYTES:
        return None
    return max(1, math.floor(float(match[1]) * _UNIT_BYTES[match[2]] / 2**30))


def _newer(image: str, repository: str, version: str, platform: Platform, builder: SpecBuilder) -> EngineProfile:
    """An old vLLM cannot be launched any more: the newest known one takes its place."""
    profile = find_profile(_NEWEST)
    if repository.endswith(_OFFICIAL) and platform in profile.images:
        reason = f"vLLM {version} is older than what the operator launches: {profile.images[platform]} takes its place"
        builder.drop(f"image {image}", f"{reason}; compare answers and speed before you move traffic")
    else:
        fix = f"holds vLLM {version}, which is older than what the operator launches: name an image of {_NEWEST}"
        builder.decide("spec.engine.image", image, fix)
    return profile


def _same(image: str, default: str | None) -> bool:
    return default is not None and image.removeprefix("docker.io/") == default.removeprefix("docker.io/")
