"""Check speculation settings against vLLM's rules, before the engine starts.

vLLM checks many of these rules only in a worker, minutes after the pod took its GPUs. For others, it silently
ignores or changes the setting. Rules that depend on the target's layers or the GPU's kernels are in
sizing/kernel_support.py.
"""

from collections.abc import Iterator
from itertools import pairwise

from specdecode_operator.api.speculation import Ngram
from specdecode_operator.enums import (
    METHODS_NEEDING_DRAFT,
    METHODS_OF_BLOCKS,
    METHODS_TAKING_DRAFT,
    METHODS_WITH_LOOKUP,
    METHODS_WITH_SAMPLING,
    METHODS_WITH_TARGETS_HEAD,
    CudagraphMode,
    DraftSampling,
    Dtype,
    Method,
    Platform,
    RejectionSampling,
)
from specdecode_operator.problems import Problem, shown
from specdecode_operator.vllm.extra_args_parser import last_option
from specdecode_operator.vllm.model_runner import draft_follows_target, runs_on_v1, waits_for_steps
from specdecode_operator.vllm.profiles import EngineProfile
from specdecode_operator.vllm.settings import EngineSettings, SpeculationSettings
from specdecode_operator.vllm.speculative_config import DRAFT_HEAD_KEY, SPECULATIVE_KEYS
from specdecode_operator.vllm.versions import FLY_KEY, ended_method

FIELD = "spec.speculation.adaptiveVerification"

_WITHOUT_WHOLE_GRAPHS = (CudagraphMode.NONE, CudagraphMode.PIECEWISE)
_LEVELS_WITHOUT = ("0", "1")
"""Optimization levels without graphs, or with pieces only (vllm/config/vllm.py, OPTIMIZATION_LEVEL_TO_CONFIG)."""


def adaptive_problems(settings: EngineSettings, profile: EngineProfile) -> list[Problem]:
    """Return the reasons why an engine with adaptive verification would not start, or would not adapt."""
    speculation = settings.speculation
    if speculation is None or not speculation.spec.adaptive_verification:
        return []
    method, adaptive = speculation.method, profile.adaptive_verification
    if method in adaptive.methods:
        messages = list(_not_adaptive(settings, method, profile))
    elif method in METHODS_WITH_SAMPLING:
        known, later = ", ".join(sorted(adaptive.methods)), adaptive.later_methods.get(method)
        instead = f'set engine.version: "{later}" or later' if later else "use one of these"
        messages = [f"vLLM {profile.version} adapts only with {known}, not with {method}; remove it, or {instead}"]
    else:
        # vllm/v1/worker/gpu/spec_decode: the speculators of lookup methods lack the flag, and model runner V1 rejects
        # it.
        messages = [f"method {method} has no draft with a confidence; remove it, or use a method with a draft"]
    return [Problem(FIELD, "true", message) for message in messages]


def _not_adaptive(settings: EngineSettings, method: Method, profile: EngineProfile) -> Iterator[str]:
    """Yield settings that conflict with adaptive verification (config/vllm.py, _validate_adaptive_verification)."""
    version = profile.version
    if settings.platform is Platform.CPU:
        yield "needs vLLM's model runner V2, which the CPU does not have; remove it"
        return
    if runs_on_v1(settings, profile):
        yield f"needs vLLM's model runner V2, and V1 serves method {method} here with vLLM {version}; remove it"
    if settings.pipeline_parallel_size > 1:
        yield (
            f"conflicts with parallelism.pipeline {settings.pipeline_parallel_size}: only the last stage can choose"
            " the length; use pipeline 1, or remove it"
        )
    mode, level = settings.serving.cudagraph_mode, last_option("--optimization-level", settings.extra_args, profile)
    without = None
    if settings.serving.enforce_eager:
        without = "serving.enforceEager"
    elif mode in _WITHOUT_WHOLE_GRAPHS:
        without = f"serving.cudagraphMode {mode}"
    elif mode is None and level is not None and level.value in _LEVELS_WITHOUT:
        without = f"engine.extraArgs -O{level.value}"
    if without is not None:
        yield f"needs full CUDA graphs, which {without} turns off; remove one of the two"
    for place in _rejected_places(settings, profile):
        yield f"vLLM {version} does not combine it with {place}; remove one of the two"


def _rejected_places(settings: EngineSettings, profile: EngineProfile) -> Iterator[str]:
    """Yield the places of flags that the version does not combine with adaptive verification."""
    for flag in sorted(profile.adaptive_verification.rejected_flags):
        option = last_option(flag, settings.extra_args, profile)
        if flag == "--enable-lora" and settings.adapters is not None:
            yield "spec.adapters"
        elif option is not None and not option.negated:
            yield f"engine.extraArgs {option.name}"


_SPECULATION = "spec.speculation"
_ASYNCHRONOUS = "--async-scheduling"
_SCHEDULE = "spec.speculation.numSpeculativeTokensByBatchSize"

_OF_ONE_LENGTH = (Method.NGRAM_GPU, Method.SUFFIX, Method.MEDUSA)
"""Methods whose proposer on model runner V1 asserts exactly K drafted tokens (vllm/v1/spec_decode, propose)."""


def speculation_problems(settings: EngineSettings, profile: EngineProfile) -> list[Problem]:
    """Return the settings of speculation that the engine would reject, or silently change."""
    speculation = settings.speculation
    if speculation is None:
        return []
    if problems := method_problems(speculation.method, profile):
        return problems
    return [
        *_schedule(speculation),
        *_shorten(settings, speculation, profile),
        *_vocab(settings, speculation, profile),
        *_head(settings, speculation, profile),
        *_version(settings, speculation, profile),
        *_draft(settings, speculation),
        *_path(settings, speculation, profile),
        *_lookup(speculation),
        *_sample(settings, speculation, profile),
        *_split(settings, speculation, profile),
        *_slot(settings, speculation, profile),
        *adaptive_problems(settings, profile),
    ]


def method_problems(method: Method, profile: EngineProfile) -> list[Problem]:
    """Return a problem for a method that the version lacks (vllm/config/speculative.py, SpeculativeMethod)."""
    if method in profile.runners:
        return []
    if ended := ended_method(method, profile.version):
        message = (
            f"vLLM {profile.version} no longer supports it; use method {ended[0]} with a head trained for this"
            f' target, or write spec.engine.version: "{ended[1]}", the last that supports it'
        )
    else:
        known = ", ".join(sorted(profile.runners))
        message = f"vLLM {profile.version} does not support it; use one of {known}"
    return [Problem(f"{_SPECULATION}.method", method, message)]


def _schedule(speculation: SpeculationSettings) -> Iterator[Problem]:
    """Check K and its schedule: num_speculative_tokens is greater than 0 (vllm/config/speculative.py).

    vllm/v1/spec_decode/dynamic/utils.py raises the other errors when it builds the scheduler, after loading.
    """
    if speculation.num_speculative_tokens < 1:
        yield Problem(
            f"{_SPECULATION}.numSpeculativeTokens",
            str(speculation.num_speculative_tokens),
            f"method {speculation.method} needs at least 1; use method none to turn speculation off",
        )
    for index, part in enumerate(speculation.schedule):
        field = f"{_SCHEDULE}[{index}]"
        if not 1 <= part.first <= part.last:
            yield Problem(field, f"{part.first} to {part.last}", "from must be at least 1 and at most to")
        if part.num_speculative_tokens < 0:
            yield Problem(field, f"{part.first} to {part.last}", "numSpeculativeTokens must not be negative")
        if part.num_speculative_tokens > speculation.num_speculative_tokens:
            # The engine would silently use the general K.
            message = f"exceeds numSpeculativeTokens, {speculation.num_speculative_tokens}; raise that, or lower this"
            yield Problem(f"{field}.numSpeculativeTokens", str(part.num_speculative_tokens), message)
    for index, (before, part) in enumerate(pairwise(speculation.schedule), start=1):
        if part.first <= before.last:
            message = (
                f"must start after the range before it, {before.first} to {before.last}; ranges are sorted and do not"
                " overlap"
            )
            yield Problem(f"{_SCHEDULE}[{index}].from", str(part.first), message)


def _shorten(settings: EngineSettings, speculation: SpeculationSettings, profile: EngineProfile) -> Iterator[Problem]:
    """Check a schedule that model runner V1 ignores (vllm/config/vllm.py, _maybe_disable_dynamic_sd_for_v1 in 0.33).

    In earlier versions an assertion ends the engine at the first step with another number of tokens.
    """
    if speculation.schedule and speculation.method in _OF_ONE_LENGTH and runs_on_v1(settings, profile):
        message = (
            f"model runner V1, which runs method {speculation.method} here, cannot shorten its drafts: as of 0.33 vLLM"
            " ignores this, and earlier versions fail at run time; remove it, or use another method"
        )
        yield Problem(_SCHEDULE, f"{len(speculation.schedule)} ranges", message)
    # vllm/v1/spec_decode/llm_base_proposer.py, propose: K rows per request are read as rows of the shorter length.
    for index, part in enumerate(speculation.schedule if speculation.drafts_in_parallel else ()):
        if 0 < part.num_speculative_tokens < speculation.num_speculative_tokens:
            message = (
                f"{speculation.draft_model} proposes all tokens in one pass, and vLLM mixes up requests if it "
                f"proposes fewer: use 0 or {speculation.num_speculative_tokens}"
            )
            field = f"{_SCHEDULE}[{index}].numSpeculativeTokens"
            yield Problem(field, str(part.num_speculative_tokens), message)


def _vocab(settings: EngineSettings, speculation: SpeculationSettings, profile: EngineProfile) -> Iterator[Problem]:
    """Check the draft's vocabulary (config/speculative.py, _verify_args); model runner V2 cannot map vocabularies."""
    if not speculation.maps_vocabulary:
        return
    field = f"{_SPECULATION}.useHeterogeneousVocab"
    if speculation.method is not Method.DRAFT_MODEL:
        message = (
            f"method {speculation.method} drafts in the vocabulary of the target; remove it, or use method draft_model"
        )
        yield Problem(field, "true", message)
        return
    if speculation.spec.draft_sampling is DraftSampling.PROBABILISTIC:
        message = "a draft of another vocabulary proposes the likeliest tokens: remove it, or useHeterogeneousVocab"
        yield Problem(f"{_SPECULATION}.draftSampling", DraftSampling.PROBABILISTIC, message)
    if settings.platform is Platform.GPU and not profile.maps_vocabularies:
        message = (
            f"vLLM {profile.version} runs a draft model on model runner V2, which silently skips the token mapping: "
            "use another engine.version, or a draft of the target's vocabulary"
        )
        yield Problem(field, "true", message)


def _head(settings: EngineSettings, speculation: SpeculationSettings, profile: EngineProfile) -> Iterator[Problem]:
    """Check the draft's output head (config/speculative.py, _verify_args; eagle/utils.py, load_eagle_model)."""
    asked, method, message = speculation.spec.draft_lm_head_quantization, speculation.method, ""
    if method not in METHODS_WITH_TARGETS_HEAD:
        message = f"method {method} has no copy of the target's output head; remove it, or use method eagle or mtp"
    elif DRAFT_HEAD_KEY not in profile.speculative_keys:
        message = profile.lacks(profile.later_speculative_keys.get(DRAFT_HEAD_KEY))
    elif runs_on_v1(settings, profile):
        message = "needs vLLM's model runner V2, and V1 serves the engine here; remove it"
    elif settings.dtype is Dtype.FLOAT32:
        # layers/quantization/online/lm_head.py, _quantize_copy, which runs after loading.
        message = "vLLM quantizes a 16-bit output head, and serving.dtype is float32; remove one of the two"
    if asked is not None and message:
        yield Problem(f"{_SPECULATION}.draftLmHeadQuantization", asked, message)


def _version(settings: EngineSettings, speculation: SpeculationSettings, profile: EngineProfile) -> Iterator[Problem]:
    """Check that the version has the key of each field that is set; `_head` checks its own key after the method."""
    for row in SPECULATIVE_KEYS:
        if row.key in profile.speculative_keys or row.key == DRAFT_HEAD_KEY:
            continue
        if (value := row.value(settings, speculation, profile)) is not None:
            yield Problem(row.field, shown(value), profile.lacks(profile.later_speculative_keys.get(row.key)))


def _draft(settings: EngineSettings, speculation: SpeculationSettings) -> Iterator[Problem]:
    """Check the draft against the method, and its length (vllm/config/speculative.py)."""
    field = f"{_SPECULATION}.draft"
    model = speculation.draft_model
    if model is None:
        if speculation.method in METHODS_NEEDING_DRAFT:
            yield Problem(field, "absent", f"method {speculation.method} needs draft.model")
        return
    if speculation.method not in METHODS_TAKING_DRAFT:
        message = f"method {speculation.method} has no draft model; remove it, or use the method of this draft"
        yield Problem(field, model, message)
        return
    length = speculation.spec.draft.max_model_len if speculation.spec.draft else None
    if length is not None and length > settings.max_model_len:
        message = f"exceeds the target's, {settings.max_model_len}; lower it, or leave it out"
        yield Problem(f"{field}.maxModelLen", str(length), message)


def _path(settings: EngineSettings, speculation: SpeculationSettings, profile: EngineProfile) -> Iterator[Problem]:
    """Check for paths that change the method: any but eagle, eagle3, dflash and dspark (vllm/config/speculative.py).

    Method mtp without a draft uses the target's checkpoint, so the target's path is checked. The rules of the pair
    reject a head as a draft_model, whatever its path.
    """
    if speculation.method is Method.DRAFT_MODEL and speculation.draft_is_head:
        return
    looked_at = {
        Method.DRAFT_MODEL: (f"{_SPECULATION}.draft.model", speculation.draft_model),
        Method.MEDUSA: (f"{_SPECULATION}.draft.model", speculation.draft_model),
        Method.MTP: (f"{_SPECULATION}.draft.model", speculation.draft_model)
        if speculation.draft_model
        else ("spec.target.model", settings.model),
    }
    field, model = looked_at.get(speculation.method, ("", None))
    for marker, method in profile.draft_path_markers.items():
        if model is not None and marker in model.lower():
            or_else = (
                "" if speculation.method is Method.MTP else f"if it is such a head, use method {method}; otherwise "
            )
            message = (
                f"vLLM changes method {speculation.method} to {method} because this path contains {marker!r}; {or_else}"
                "serve it from a folder and a mount without it in their names (models.volume)"
            )
            yield Problem(field, model, message)
            return


def _lookup(speculation: SpeculationSettings) -> Iterator[Problem]:
    """Check the lookup fields: prompt_lookup_min is at most prompt_lookup_max (vllm/config/speculative.py)."""
    ngram = speculation.spec.ngram or Ngram()
    shortest, longest = ngram.prompt_lookup_min, ngram.prompt_lookup_max
    if speculation.method is not Method.SUFFIX and speculation.spec.suffix is not None:
        message = f"method {speculation.method} does not use earlier answers; remove it, or use method suffix"
        yield Problem(f"{_SPECULATION}.suffix", "present", message)
    if speculation.method not in METHODS_WITH_LOOKUP:
        if shortest is not None or longest is not None:
            message = f"method {speculation.method} does not look up the prompt; remove it, or use method ngram"
            yield Problem(f"{_SPECULATION}.ngram", f"{shortest} to {longest}", message)
        return
    if shortest is not None and longest is not None and shortest > longest:
        message = f"must be at most promptLookupMax, {longest}"
        yield Problem(f"{_SPECULATION}.ngram.promptLookupMin", str(shortest), message)


def _sample(settings: EngineSettings, speculation: SpeculationSettings, profile: EngineProfile) -> Iterator[Problem]:
    """Check sampling that model runner V1 ignores, and methods whose draft has no distribution.

    Only the speculators of vllm/v1/worker/gpu/spec_decode/speculator.py sample, and on V1 the methods with layers
    (vllm/v1/sample/rejection_sampler.py).
    """
    if speculation.spec.rejection_sampling is RejectionSampling.BLOCK and runs_on_v1(settings, profile):
        message = f"vLLM's model runner V1, which runs method {speculation.method} here, does not have it; remove it"
        yield Problem(f"{_SPECULATION}.rejectionSampling", RejectionSampling.BLOCK, message)
    samples = speculation.spec.draft_sampling is DraftSampling.PROBABILISTIC
    if samples and speculation.method not in METHODS_WITH_SAMPLING:
        message = f"method {speculation.method} has no draft that samples; remove it"
        yield Problem(f"{_SPECULATION}.draftSampling", DraftSampling.PROBABILISTIC, message)
    # vllm/config/speculative.py, _verify_args; on the CPU vllm/v1/sample/rejection_sampler.py, __init__.
    field, asked = f"{_SPECULATION}.rejectionSampling", RejectionSampling.FLY
    if speculation.spec.rejection_sampling is not RejectionSampling.FLY:
        if speculation.spec.lossy:
            message = "only applies to rejectionSampling fly; remove it, or use rejectionSampling fly"
            yield Problem(f"{_SPECULATION}.lossy", "true", message)
        return
    if not speculation.spec.lossy:
        message = (
            "rejectionSampling fly changes the target's answers; set lossy: true to accept that, or use"
            " rejectionSampling block"
        )
        yield Problem(f"{_SPECULATION}.lossy", "absent", message)
    if FLY_KEY not in profile.speculative_keys:
        message = (
            f'vLLM {profile.version} does not have it; remove it and lossy, or set engine.version: "0.33" or later'
        )
        yield Problem(field, asked, message)
    elif settings.platform is Platform.CPU:
        yield Problem(
            field, asked, "vLLM supports it only on GPUs, and the engine runs on the CPU; remove it and lossy"
        )
    elif speculation.num_speculative_tokens == 1:
        message = "needs tokens after a rejected one, and only one is proposed; set numSpeculativeTokens to 2 or more"
        yield Problem(field, asked, message)


def _split(settings: EngineSettings, speculation: SpeculationSettings, profile: EngineProfile) -> Iterator[Problem]:
    """Check methods that this model runner, or this parallelism, does not support."""
    on_cpu = settings.platform is Platform.CPU
    if on_cpu and speculation.method is Method.DSPARK:
        # vllm/config/vllm.py, _get_v1_model_runner_unsupported_features.
        message = "needs vLLM's model runner V2, which the CPU does not have; use another method"
        yield Problem(f"{_SPECULATION}.method", speculation.method, message)
    if on_cpu and speculation.method is Method.NGRAM_GPU:
        # vllm/v1/worker/gpu_model_runner.py, __init__: pins memory for it, which needs NVIDIA's driver.
        message = "looks the prompt up on a GPU, and the engine runs on the CPU; use method ngram"
        yield Problem(f"{_SPECULATION}.method", speculation.method, message)
    if settings.pipeline_parallel_size > 1 and speculation.method is Method.DRAFT_MODEL:
        # vllm/v1/spec_decode/draft_model.py, vllm/v1/worker/gpu/spec_decode/standalone_ar: vLLM does not reject it.
        message = (
            "with method draft_model vLLM would build the draft from the layers of one stage; use 1, or a draft head"
        )
        yield Problem("spec.parallelism.pipeline", str(settings.pipeline_parallel_size), message)
    elif settings.pipeline_parallel_size > 1 and not profile.drafts_over_stages[speculation.method]:
        # vllm/config/speculative.py, create_draft_parallel_config: heads would also be split into stages.
        message = f"vLLM {profile.version} does not combine stages with method {speculation.method}; use 1"
        yield Problem("spec.parallelism.pipeline", str(settings.pipeline_parallel_size), message)
    if settings.data_parallel_size > 1 and speculation.schedule:
        # vllm/config/vllm.py, _maybe_disable_dynamic_sd_for_data_parallel.
        message = "vLLM ignores it with parallelism.data, whose ranks must draft alike; use replicas instead of data"
        yield Problem(_SCHEDULE, f"{len(speculation.schedule)} ranges", message)
    asked, tensor = speculation.draft_tensor_parallel_size, settings.tensor_parallel_size
    if asked is None or asked == tensor:
        return
    if asked != 1:
        # vllm/config/speculative.py, _verify_and_get_draft_tp.
        yield Problem("spec.parallelism.draftTensor", str(asked), f"vLLM accepts 1 or the target's, {tensor}")
    elif draft_follows_target(speculation, profile, on_cpu=on_cpu):
        message = (
            f"vLLM {profile.version} rejects a draft model with another tensor parallelism than the target, {tensor}; "
            "remove it"
        )
        yield Problem("spec.parallelism.draftTensor", str(asked), message)


def _slot(settings: EngineSettings, speculation: SpeculationSettings, profile: EngineProfile) -> Iterator[Problem]:
    """Check that a step fits one request: K drafted tokens, its own token, and the method's extra slots.

    With fewer, the engine would start and never verify a whole draft (vllm/v1/core/sched/scheduler.py, schedule).
    """
    needed = speculation.num_speculative_tokens + 1 + draft_slots(speculation, profile)
    if speculation.method in METHODS_OF_BLOCKS:
        # The draft's own pass takes K + 1 tokens of a step, and must leave one.
        needed = max(needed, speculation.num_speculative_tokens + 2)
    if settings.max_num_batched_tokens < needed:
        message = f"must be at least {needed} to verify {speculation.num_speculative_tokens} drafted tokens in one step"
        yield Problem("spec.serving.maxNumBatchedTokens", str(settings.max_num_batched_tokens), message)
    # vllm/config/vllm.py: explicit asynchronous scheduling fails with methods that draft on the host.
    given = last_option(_ASYNCHRONOUS, settings.extra_args, profile)
    waits = waits_for_steps(speculation.method, profile, on_v1=runs_on_v1(settings, profile))
    if given is not None and not given.negated and waits:
        message = f"vLLM {profile.version} does not combine it with method {speculation.method}; remove it"
        yield Problem(f"spec.engine.extraArgs[{given.index}]", given.name, message)


def draft_slots(speculation: SpeculationSettings, profile: EngineProfile) -> int:
    """Return the token slots per request that drafting adds to a step."""
    slots = profile.parallel_draft_slots if speculation.drafts_in_parallel else profile.extra_draft_slots
    return slots[speculation.method].at(speculation.num_speculative_tokens)
