"""Collect all problems of a spec in one list.

Rules of vLLM itself are in the package `vllm`, rules between target and draft in `model_checks.py`, fields that
podTemplate may not set in `pod_template_merge.py`. Lookups that fail, such as an unknown model, are reported by
`spec_facts.py` and `models/checkpoints.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Final

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import Key, ReplayMode, SpecDecodeDeploymentSpec
from specdecode_operator.cluster.nodes import PRODUCT_LABEL, product_refusal
from specdecode_operator.deployment.adapter_checks import adapter_problems, adapter_problems_without_models
from specdecode_operator.deployment.engine_settings import engine_settings
from specdecode_operator.deployment.model_checks import class_problems, pairing_problems
from specdecode_operator.deployment.models.model_locations import (
    DRAFT,
    NO_MODELS,
    TARGET,
    KnownModels,
    ModelSource,
    downloads_in_pods,
    fetched_models,
    undescribed_models,
)
from specdecode_operator.deployment.parsed_deployment import schedule_problems
from specdecode_operator.deployment.pod_security import pod_problems
from specdecode_operator.deployment.pod_template_merge import pod_template_problems
from specdecode_operator.deployment.resource_claim import claims_devices, selector_problems
from specdecode_operator.deployment.spec_facts import Facts, engine_profile, gather_facts, platform_of
from specdecode_operator.enums import (
    AcceleratorType,
    Dtype,
    KvCacheDtype,
    Method,
    Platform,
    Precision,
    Quantization,
    RejectionSampling,
)
from specdecode_operator.problems import MISSING, InvalidSpecError, Problem, shown_or_missing
from specdecode_operator.sizing.calibration import UNCALIBRATED, Calibration
from specdecode_operator.sizing.devices import MEMORY_FIELD, find_device, similar_products
from specdecode_operator.sizing.geometry import BLOCK_TOKENS
from specdecode_operator.sizing.kernel_support import cache_dtype_problem, dtype_problem, served_precision
from specdecode_operator.sizing.pair import NO_LENGTH, Pair, longest_sequence, says_no_length, spread_problems
from specdecode_operator.sizing.plan import pair_at
from specdecode_operator.sizing.tensor_parallel import split_remedy, supported_tensors, tensor_problems
from specdecode_operator.sizing.weights import parameter_count
from specdecode_operator.untrusted import mapping, objects
from specdecode_operator.vllm.environment import allows_longer, env_problems, known_values
from specdecode_operator.vllm.extra_args_parser import last_option
from specdecode_operator.vllm.extra_args_rules import extra_args_problems
from specdecode_operator.vllm.flag_values import flag_value_problems
from specdecode_operator.vllm.profiles import EngineProfile
from specdecode_operator.vllm.serving_rules import image_problems, serving_problems
from specdecode_operator.vllm.speculation_rules import method_problems, speculation_problems
from specdecode_operator.vllm.speculative_config import extra_config_problems

UNKNOWN_MEMORY: Final = "no memory figures are known for this product"
_ITEM_LIMITS: Final = ("--limit-mm-per-prompt", "--language-model-only", "--mm-processor-kwargs")
_MOST_PARAMETERS: Final = 10**14  # A hundred times the largest models that are known
# Longest name of an object with engines on several nodes. It is part of the name of the workers' StatefulSet, which is,
# with a hash, a label value of at most 63 characters (pkg/controller/history in Kubernetes).
_GROUP_NAME_MAX_LENGTH: Final = 45


def valid_facts(
    spec: SpecDecodeDeploymentSpec, known: KnownModels = NO_MODELS, calibration: Calibration = UNCALIBRATED
) -> Facts:
    """Return the facts of a valid spec.

    Raises InvalidSpecError with all problems, or only with failed lookups, because other rules need their results.
    """
    facts = gather_facts(spec, known, calibration)
    _raise(facts_problems(facts))
    return facts


def facts_problems(facts: Facts) -> list[Problem]:
    """Return everything that is wrong with a spec whose models are known."""
    spec, profile, pair = facts.spec, facts.profile, facts.pair
    settings = engine_settings(spec, pair, spec.parallelism.tensor or 1)
    return [
        *_shape_problems(spec, pair),
        *_item_problems(facts),
        *_dtype_problems(facts),
        *_cache_dtype_problems(facts),
        *class_problems(spec, pair, profile),
        *adapter_problems(facts),
        *pairing_problems(spec, pair, profile),
        *_tensor_problems(facts),
        *serving_problems(settings, profile),
        *flag_value_problems(settings, profile, known_values(spec.engine.env)),
        *speculation_problems(settings, profile),
        *_problems_without_models(spec, profile),
    ]


def check_without_models(
    spec: SpecDecodeDeploymentSpec, unread: Mapping[str, ModelSource] = MappingProxyType({})
) -> EngineProfile:
    """Check the rules that do not need facts about the models; return the engine's profile."""
    _raise(
        [
            Problem(f"{field}.model", source.model, "must be a path inside the volume, without ..")
            for field, source in unread.items()
            if source.on_volume and ".." in source.model.split("/")
        ]
    )
    profile = engine_profile(spec)
    method = spec.speculation.method if spec.speculation else Method.NONE
    of_method = [] if method is Method.NONE else method_problems(method, profile)
    _raise([*of_method, *_problems_without_models(spec, profile)])
    return profile


def refuse_host_paths(spec: SpecDecodeDeploymentSpec, allowed: Sequence[str]) -> None:
    """Reject directories of the nodes that are not allowed: a pod could read files of other users."""
    problems = []
    for field, path in _host_paths(spec).items():
        if not _is_inside(path, allowed):
            fix = (
                "this operator does not allow directories of nodes: use a persistentVolumeClaim, or ask its"
                f" administrator to start it with --allow-host-path={path}"
            )
            if allowed:
                fix = (
                    f"is outside the directories that this operator allows: use one in {', '.join(allowed)}, without .."
                )
            problems.append(Problem(field, path, fix))
    _raise(problems, reason="HostPathNotAllowed")


def refuse_pod_template(spec: SpecDecodeDeploymentSpec, allowed: frozenset[str], namespace: str) -> None:
    """Reject a podTemplate that reaches beyond the object's namespace, unless that is allowed by name."""
    template = spec.pod_template
    if template is not None:
        given = {"metadata": template.metadata, "spec": template.spec}
        _raise(pod_problems(given, "spec.podTemplate", allowed, namespace), reason="PodTemplateNotAllowed")


def is_still_allowed(pod: Body, host_paths: Sequence[str], allowed: frozenset[str], namespace: str) -> bool:
    """Return whether a pod that the operator rendered earlier would be accepted today."""
    paths = [mapping(volume, "hostPath").get("path") for volume in objects(mapping(pod, "spec"), "volumes")]
    is_inside = all(_is_inside(str(path), host_paths) for path in paths if path)
    return is_inside and not pod_problems(pod, "", allowed, namespace)


def refuse_group_name(key: Key, nodes: int) -> None:
    """Reject a name that is too long for engines on several nodes; ``nodes`` is known only from the plan."""
    if nodes > 1 and len(key.name) > _GROUP_NAME_MAX_LENGTH:
        message = f"is too long for replicas on {nodes} nodes: use {_GROUP_NAME_MAX_LENGTH} characters or less"
        _raise([Problem("metadata.name", key.name, message)])


def _raise(problems: list[Problem], reason: str = "Invalid") -> None:
    if problems:
        raise InvalidSpecError(problems, reason)


def _problems_without_models(spec: SpecDecodeDeploymentSpec, profile: EngineProfile) -> list[Problem]:
    platform, replay, speculation = platform_of(spec), spec.engine.replay, spec.speculation
    images, further = list[Problem](), list[Problem]()
    if replay is None or replay.mode is ReplayMode.EMULATED:
        images = image_problems(spec.engine.image, platform if replay is None else Platform.CPU, profile)
    if speculation is not None and speculation.extra_config:
        is_fly = speculation.rejection_sampling is RejectionSampling.FLY
        further = [*extra_config_problems(speculation.extra_config, profile, checks_by_entropy=is_fly)]
    return [
        *_product_problems(spec),
        *images,
        *_recording_problems(spec),
        *_emulation_problems(spec),
        *_revision_problems(spec),
        *extra_args_problems(spec.engine.extra_args, profile),
        *adapter_problems_without_models(spec, profile),
        *further,
        *env_problems(spec.engine.env),
        *selector_problems(spec),
        *pod_template_problems(spec.pod_template, platform if replay is None else None, claims=claims_devices(spec)),
        *schedule_problems(spec.captures),
    ]


def _recording_problems(spec: SpecDecodeDeploymentSpec) -> Iterator[Problem]:
    """Yield a recording without a source: an object stored without the CRD's rules may lack one."""
    trace = None if spec.engine.replay is None else spec.engine.replay.trace
    if trace is not None and trace.config_map is None and trace.persistent_volume_claim is None:
        message = "a recording has one source: set one of configMap and persistentVolumeClaim"
        yield Problem("spec.engine.replay.trace.configMap", MISSING, message)


def _emulation_problems(spec: SpecDecodeDeploymentSpec) -> Iterator[Problem]:
    """Yield settings that an emulated engine does not support (replay/emulation.py)."""
    if spec.engine.replay is None or spec.engine.replay.mode is not ReplayMode.EMULATED:
        return
    if spec.adapters:
        yield Problem("spec.adapters", str(len(spec.adapters)), "mode Emulated runs no adapters: remove them")
    for field in undescribed_models(spec):
        message = "mode Emulated needs the model's config.json: write its content there"
        yield Problem(f"{field}.config", "absent", message)
    for name, count in (("pipeline", spec.parallelism.pipeline), ("data", spec.parallelism.data)):
        if count > 1:
            yield Problem(f"spec.parallelism.{name}", str(count), "one stage of one copy is emulated: use 1")


def _shape_problems(spec: SpecDecodeDeploymentSpec, pair: Pair) -> Iterator[Problem]:
    for field, model in (("spec.target.config", pair.target), ("spec.speculation.draft.config", pair.draft)):
        if model is not None and parameter_count(model) > _MOST_PARAMETERS:
            message = f"describes a model of {parameter_count(model):.1e} parameters: check its sizes"
            yield Problem(field, model.name, message)
    wanted, longest = spec.serving.max_model_len, longest_sequence(pair.target, pair.limits.engine_version)
    if wanted is None and says_no_length(pair.target):
        yield Problem("spec.serving.maxModelLen", MISSING, NO_LENGTH)
    if wanted is not None and wanted > longest and not allows_longer(spec.engine.env):
        message = f"was made for at most {longest} tokens: use that or less, or set target.ropeScaling"
        if spec.target.rope_scaling is not None:
            message = f"reaches {longest} tokens with target.ropeScaling: use that or less, or raise that"
        yield Problem("spec.serving.maxModelLen", str(wanted), f"{pair.target.name} {message}")
    workload, most, block = spec.workload, pair.limits.max_model_len, pair.limits.block_size
    usual = (workload.prompt_tokens or 0) + (workload.output_tokens or 0) if workload else 0
    if workload and None not in (workload.prompt_tokens, workload.output_tokens) and usual > most:
        message = f"with workload.outputTokens makes {usual} tokens, more than maxModelLen {most}: lower one of them"
        yield Problem("spec.workload.promptTokens", str(workload.prompt_tokens), message)
    # vllm/v1/attention/backends/mla/indexer.py: its cache has blocks of 64 tokens, so the KV cache must have them too.
    if pair.target.has_sparse_attention and block % BLOCK_TOKENS:
        message = f"chooses tokens by an index with blocks of {BLOCK_TOKENS}: remove it, or write that"
        yield Problem("spec.serving.blockSize", str(block), f"{pair.target.name} {message}")


def _item_problems(facts: Facts) -> Iterator[Problem]:
    """Yield a step size that is too small for the largest image or video of a model that must not be split.

    vllm/v1/core/encoder_cache_manager.py, compute_mm_encoder_budget. vllm/platforms/cuda.py, check_and_update_config,
    forbids splitting for models with bidirectional attention within images. The flag --disable-chunked-mm-input does so
    for any model.
    """
    tower, tokens = facts.pair.target.tower, facts.pair.limits.max_num_batched_tokens
    extra_args, profile = facts.spec.engine.extra_args, facts.profile
    cuts = last_option("--disable-chunked-mm-input", extra_args, profile)
    whole = (tower.whole_items and not facts.on_cpu) or (cuts is not None and not cuts.negated)
    limited = any(last_option(flag, extra_args, profile) is not None for flag in _ITEM_LIMITS)
    images_of_video = facts.pair.limits.max_model_len // tower.item_tokens if tower.item_tokens else 1
    largest = tower.item_tokens * max(1, min(tower.longest_item, images_of_video))
    if whole and not limited and tokens < largest:
        message = (
            f"vLLM reads an image or a video of {facts.pair.target.name} in one step, and the largest has {largest}"
            f" tokens: use {largest} or more, or limit them in engine.extraArgs, such as --limit-mm-per-prompt.video=0"
            " or --language-model-only"
        )
        yield Problem("spec.serving.maxNumBatchedTokens", str(tokens), message)


def _dtype_problems(facts: Facts) -> Iterator[Problem]:
    """Yield models that vLLM does not run in serving.dtype; a draft gets the target's (vllm/config/speculative.py)."""
    pair, dtype = facts.pair, facts.spec.serving.dtype
    for model, precision in ((pair.target, pair.target_precision), (pair.draft, pair.draft_precision)):
        if model is not None and (message := dtype_problem(model, served_precision(model, precision), dtype)):
            yield Problem("spec.serving.dtype", dtype, message)
            return
    chosen = ((TARGET, facts.options.target), (DRAFT, facts.options.draft))
    for field, choices in chosen if dtype is Dtype.FLOAT32 else ():
        if choices:
            message = f"with {field.removeprefix('spec.')}.quantization Auto the plan may choose FP8, which vLLM"
            yield Problem("spec.serving.dtype", dtype, f"{message} multiplies in 16 bits: write AsCheckpoint there")


def _cache_dtype_problems(facts: Facts) -> Iterator[Problem]:
    target, serving = facts.pair.target, facts.spec.serving
    wanted = serving.kv_cache_dtype
    if message := cache_dtype_problem(
        target, wanted, facts.pair.limits.engine_version, facts.spec.accelerator.products
    ):
        yield Problem("spec.serving.kvCacheDtype", wanted.value, message)
    # vllm/config/vllm.py, _reject_mismatched_float_kv_cache. `vllm/serving_rules.py` checks an explicit serving.dtype.
    if not facts.profile.cache_follows_dtype or wanted is not KvCacheDtype.BFLOAT16:
        return
    # For auto, vLLM chooses float16 if the checkpoint is in float16 and the model is stable in it (config/model.py).
    by_itself = serving.dtype is Dtype.AUTO and facts.spec.target.quantization is not Quantization.BF16
    is_stable = by_itself and dtype_problem(target, Precision.BF16, Dtype.FLOAT16) is None
    if is_stable and facts.stored_type == Dtype.FLOAT16:
        message = f"vLLM {facts.profile.version} takes it with models in bfloat16 only, and {target.name} is in float16"
        yield Problem("spec.serving.kvCacheDtype", wanted.value, f"{message}: write auto, or serving.dtype: bfloat16")


def _tensor_problems(facts: Facts) -> Iterator[Problem]:
    """Yield unsupported splits that planning cannot avoid with another precision or checkpoint."""
    pair, options, tensor = facts.pair, facts.options, facts.spec.parallelism.tensor
    for bad in spread_problems(pair.target, options.spread, pair.limits.engine_version):
        yield Problem(f"spec.{bad.field}", shown_or_missing(bad.value), bad.message)
    if tensor is None:
        return
    available = options.available
    if facts.on_cpu:
        pair = pair_at(pair, available, pair.target_precision, pair.draft_precision)
    models = []
    if facts.on_cpu or (not options.target and pair.target_precision not in available.target_precisions):
        models.append((TARGET, pair.target, pair.target_precision))
    draft_is_decided = facts.on_cpu or (not options.draft and pair.draft_precision not in available.draft_precisions)
    if pair.draft is not None and pair.draft_precision is not None and draft_is_decided:
        models.append((DRAFT, pair.draft, pair.draft_precision))
    version, data, expert = pair.limits.engine_version, options.spread.data, options.spread.expert
    for field, model, precision in models:
        found = tensor_problems(model, tensor, precision, version, data=data, expert=expert)
        reasons = "; ".join(problem.message for problem in found)
        if found and not supported_tensors([(model, precision)], version, data=data, expert=expert):
            remedy = split_remedy([(model, precision)], version, data=data, expert=expert)
            yield Problem(f"{field}.model", model.name, f"{reasons}; {remedy}")
        elif found:
            remedy = split_remedy(pair.served, version, data=data, expert=expert)
            role = field.rpartition(".")[2]
            yield Problem("spec.parallelism.tensor", str(tensor), f"{role}: {reasons}; {remedy}")


def _product_problems(spec: SpecDecodeDeploymentSpec) -> Iterator[Problem]:
    if spec.accelerator.type is AcceleratorType.CPU:
        return
    for index, product in enumerate(spec.accelerator.products):
        if find_device(product) is not None:
            continue
        field = f"spec.accelerator.products[{index}]"
        if refused := product_refusal(product):
            yield Problem(field, product, refused)
        elif spec.accelerator.memory_gib_per_gpu is None:
            meant = similar_products(product)
            label = f"write the value of the node label {PRODUCT_LABEL}: {' or '.join(meant)}, or " if meant else ""
            fix = f"{label}set spec.{MEMORY_FIELD} to the memory that CUDA reports, in GiB"
            yield Problem(field, product, f"{UNKNOWN_MEMORY}: {fix}")


def _revision_problems(spec: SpecDecodeDeploymentSpec) -> Iterator[Problem]:
    """Yield two revisions of one model, which each pod would download to the same folder."""
    seen: dict[str, tuple[str, str | None]] = {}
    for field, model in fetched_models(spec).items() if downloads_in_pods(spec) else ():
        other, revision = seen.setdefault(model.model, (field, model.revision))
        if model.revision != revision:
            role = "the target" if other == TARGET else other.removeprefix("spec.")
            message = (
                f"{role} is the same model at {revision or 'its default'}, and pods download both to one folder; name"
                " one revision for both, or use models.cache, where each has its own"
            )
            yield Problem(f"{field}.revision", shown_or_missing(model.revision), message)


def _host_paths(spec: SpecDecodeDeploymentSpec) -> dict[str, str]:
    volume, template = spec.models.volume, spec.pod_template
    found = {}
    if volume is not None and volume.host_path is not None:
        found["spec.models.volume.hostPath.path"] = volume.host_path.path
    volumes = ((template.spec if template else None) or {}).get("volumes")
    for index, each in enumerate(volumes if isinstance(volumes, list) else []):
        if isinstance(each, dict) and (path := mapping(each, "hostPath").get("path")):
            found[f"spec.podTemplate.spec.volumes[{index}].hostPath.path"] = str(path)
    return found


def _is_inside(path: str, allowed: Sequence[str]) -> bool:
    parts = PurePosixPath(path)
    return ".." not in parts.parts and any(parts.is_relative_to(PurePosixPath(prefix)) for prefix in allowed)
