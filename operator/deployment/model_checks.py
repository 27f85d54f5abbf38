"""Check whether vLLM supports the model classes, and whether a target and its draft are compatible."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Final

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.deployment.models.model_locations import DRAFT, TARGET, served_models
from specdecode_operator.enums import (
    METHODS_OF_BLOCKS,
    METHODS_TAKING_DRAFT,
    METHODS_WITH_LAYERS,
    AcceleratorType,
    DraftSampling,
    Method,
    Precision,
    Quantization,
)
from specdecode_operator.problems import Problem, shown_or_missing
from specdecode_operator.sizing.catalogue import known_drafts, made_for
from specdecode_operator.sizing.errors import PlanError, SizingError
from specdecode_operator.sizing.families import draft_heads
from specdecode_operator.sizing.geometry import ModelGeometry
from specdecode_operator.sizing.memory.kv_cache import cache_layout
from specdecode_operator.sizing.other_drafts import known_heads, matching_drafts
from specdecode_operator.sizing.pair import Pair, Parallelism, loaded_draft, longest_sequence, vocabulary_mismatch
from specdecode_operator.sizing.tensor_parallel import tensor_problems
from specdecode_operator.sizing.version_rules import Runner
from specdecode_operator.vllm.extra_args_parser import last_option
from specdecode_operator.vllm.profiles import EngineProfile

# Methods for which model runner V1 uses one block table for all layers of the draft.
_DRAFTS_IN_ONE_GROUP: Final = (Method.DRAFT_MODEL, Method.EAGLE, Method.EAGLE3)
# Prefixes of architectures with M-RoPE, even if config.json does not say so.
_SEVERAL_DIMENSIONS: Final = ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3_5")
_LARGEST_TENSOR: Final = 8
# Starved drafts: NVIDIA/TensorRT-LLM#16888. What 0 tokens cost in vLLM: vllm-project/vllm#49548.
_NOT_OFF: Final = (
    "0 tokens do not turn speculation off: the draft keeps its memory, and its acceptance may collapse when drafting"
    " resumes, so use 1 instead of 0, or speculation.method none"
)


def runs_on_v1(spec: SpecDecodeDeploymentSpec, pair: Pair) -> bool:
    """Whether model runner V1 serves a pair; on CPU it always does (vllm/config/vllm.py, use_v2_model_runner)."""
    return spec.accelerator.type is AcceleratorType.CPU or pair.era.runner is Runner.V1


def runner_problems(spec: SpecDecodeDeploymentSpec, method: Method, pair: Pair) -> Iterator[Problem]:
    """Yield why model runner V1 would fail with this pair."""
    draft = pair.draft
    if draft is None or not runs_on_v1(spec, pair):
        return
    version = pair.limits.engine_version
    # vllm/transformers_utils/config.py, uses_mrope.
    several = any(key == "mrope_section" for rope in draft.ropes for key, _ in rope.parameters)
    if method is Method.DRAFT_MODEL and (several or draft.architecture.startswith(_SEVERAL_DIMENSIONS)):
        # vllm/v1/spec_decode/llm_base_proposer.py, _raise_if_mrope.
        message = (
            f"has positions in several dimensions (M-RoPE), which vLLM {version} cannot use in a draft here: use a "
            "text-only draft, or method ngram"
        )
        yield Problem(f"{DRAFT}.model", draft.name, message)
    asked, found = spec.parallelism, list[int]()
    splits = [asked.tensor] if asked.tensor else [1 << power for power in range(_LARGEST_TENSOR.bit_length())]
    for tensor in splits if method in _DRAFTS_IN_ONE_GROUP else ():
        with suppress(SizingError):  # other rules report it
            layout = cache_layout(pair, Parallelism(tensor, asked.pipeline))
            found.append(max(stage.groups_of_draft for stage in layout))
    if (groups := min(found, default=1)) > 1:
        # vllm/v1/spec_decode/llm_base_proposer.py, validate_same_kv_cache_group.
        message = (
            f"with {pair.target.name} its layers are in {groups} groups of the KV cache, and vLLM {version} only "
            "drafts from one here: use a draft whose layers have the same kind of attention, or method ngram"
        )
        yield Problem(f"{DRAFT}.model", draft.name, message)


def schedule_notes(spec: SpecDecodeDeploymentSpec, profile: EngineProfile, pair: Pair) -> list[str]:
    """Return the effects of a schedule of draft lengths on CUDA graphs and on drafting."""
    speculation = spec.speculation
    if speculation is None or not pair.other_draft_lengths:
        return []
    on_v1, on_cpu = runs_on_v1(spec, pair), spec.accelerator.type is AcceleratorType.CPU
    effects = []
    if on_cpu or not pair.limits.captures_graphs:
        pass
    elif on_v1:
        # vllm/config/vllm.py, _maybe_override_dynamic_sd_cudagraph_mode.
        effects.append(
            "CUDA graphs are captured in pieces only, and counted as in mode FULL_AND_PIECEWISE, at most as much"
        )
    else:
        # vllm/v1/worker/gpu/cudagraph_utils.py, _init_candidates.
        effects.append("CUDA graphs are captured for each number of tokens, and counted at most")
    if speculation.method in METHODS_WITH_LAYERS and speculation.method is not Method.MEDUSA:
        # For V1: vllm/v1/spec_decode/llm_base_proposer.py, propose. For V2 the table of versions names the source.
        is_off = 0 in pair.other_draft_lengths
        if not on_v1 and speculation.method not in profile.shortens_drafts_on_v2:
            still = f"the draft still proposes {pair.num_speculative_tokens} tokens each step"
            effects.append(f"{still}, and surplus tokens are dropped unverified")
        elif is_off:
            effects.append("for 0 tokens the draft still runs once each step, to keep its KV cache up")
        effects += [_NOT_OFF] if is_off else []
    runner = Runner.V1 if on_v1 else Runner.V2
    start = f"with numSpeculativeTokensByBatchSize on model runner {runner} of vLLM {pair.limits.engine_version}"
    return [f"{start}, {'; '.join(effects)}"] if effects else []


_READS_INNER_STATES: Final = (Method.EAGLE3, Method.DFLASH, Method.DSPARK)
# Methods whose head gets the target's context length (vllm/config/speculative.py), or has no limit.
GETS_LONGER: Final = (Method.EAGLE, Method.EAGLE3, Method.MEDUSA)


def pairing_problems(spec: SpecDecodeDeploymentSpec, pair: Pair, profile: EngineProfile) -> list[Problem]:
    """Return why the engine would not start, or would never accept a token, with this pair."""
    method = spec.speculation.method if spec.speculation else Method.NONE
    return [
        *_role_problems(spec, method, pair),
        *_match_problems(spec, method, pair, profile),
        *_draft_problems(spec, method, pair),
        *_state_problems(spec, method, pair.target, profile),
        *_count_problems(pair),
        *_refiner_problems(spec, pair),
        *_class_problems(spec, method, pair),
        *_assistant_problems(spec, pair),
        *_package_problems(spec, method, profile),
        *_split_problems(spec, method, pair),
        *_data_parallel_problems(spec, method, pair, profile),
        *runner_problems(spec, method, pair),
    ]


def _data_parallel_problems(
    spec: SpecDecodeDeploymentSpec, method: Method, pair: Pair, profile: EngineProfile
) -> Iterator[Problem]:
    """Yield methods that fail with data-parallel replicas of a mixture of experts.

    The replicas compute in step, and vllm/forward_context.py, DPMetadata.make, compares their numbers of tokens.
    """
    data, version = spec.parallelism.data, profile.version
    fails = method in METHODS_OF_BLOCKS and not profile.drafts_blocks_over_copies and not runs_on_v1(spec, pair)
    if fails and data > 1 and pair.target.has_experts:
        message = (
            f"vLLM {version} ends at its start with method {method} and copies of {pair.target.name}, which has"
            " experts: use 1, or vLLM 0.30 or newer"
        )
        yield Problem("spec.parallelism.data", str(data), message)


def _role_problems(spec: SpecDecodeDeploymentSpec, method: Method, pair: Pair) -> Iterator[Problem]:
    """Yield heads used as models and models used as heads; vLLM loads a head only with its own target."""
    target, draft = pair.target, pair.draft
    if (drafts_by := draft_heads.method_of_head(target)) is not None:
        verifier = next(iter(made_for(target)), "the model that it was made for")
        message = f"is a draft head: name {verifier}, and this one as speculation.draft.model with method: {drafts_by}"
        yield Problem(f"{TARGET}.model", target.name, message)
    if draft is None or method not in METHODS_TAKING_DRAFT:
        return
    proposes_by = draft_heads.method_of_head(draft)
    if draft.head is None and method not in (Method.DRAFT_MODEL, Method.MTP):
        named = _other_head(target, method)
        refused = vocabulary_mismatch(target, draft) or any(runner_problems(spec, Method.DRAFT_MODEL, pair))
        otherwise = "" if refused else ", or use method: draft_model"
        message = f"is a complete model, and method {method} needs a head: {named}{otherwise}"
        yield Problem(f"{DRAFT}.model", draft.name, message)
    elif proposes_by is not None and method is Method.DRAFT_MODEL:
        message = f"is a draft head: use method: {proposes_by}, or name a complete model for method {method}"
        yield Problem(f"{DRAFT}.model", draft.name, message)
    elif proposes_by not in (None, method) and not draft.is_made_up:
        message = f"is a head for method {proposes_by}: use that, or name a head for {method}"
        yield Problem(f"{DRAFT}.model", draft.name, message)


def _match_problems(
    spec: SpecDecodeDeploymentSpec, method: Method, pair: Pair, profile: EngineProfile
) -> Iterator[Problem]:
    """Yield differences in width and vocabulary between target and draft.

    vllm/model_executor/models/llama_eagle3.py projects hidden states from the width that the head was made for.
    """
    target, draft = pair.target, pair.draft
    if draft is None or method not in METHODS_TAKING_DRAFT:
        return
    head = draft.head
    # For Medusa, vLLM sets the target's vocabulary (config/speculative.py).
    compared = method is not Method.MEDUSA and not pair.maps_vocabulary
    if compared and vocabulary_mismatch(target, draft):
        reason = vocabulary_mismatch(target, draft, _unless_mapped(spec, pair, profile))
        remedy = _other_head(target, method) if head is not None else _other_draft(spec, pair, profile)
        yield Problem(f"{DRAFT}.model", draft.name, f"{reason}: {remedy}")
    reads_width = draft.hidden_size if head is None and method is Method.MTP else head.reads_width if head else None
    if reads_width is not None and reads_width != target.hidden_size:
        message = (
            f"was made for hidden states of width {reads_width}, and those of {target.name} have "
            f"{target.hidden_size}: {_other_head(target, method)}"
        )
        yield Problem(f"{DRAFT}.model", draft.name, message)
    if head is not None and method is not Method.MEDUSA and head.output_rows > draft.vocab_size:
        message = f"proposes from {head.output_rows} tokens, more than its vocabulary of {draft.vocab_size}"
        yield Problem(f"{DRAFT}.model", draft.name, f"{message}: check its draft_vocab_size")


def _unless_mapped(spec: SpecDecodeDeploymentSpec, pair: Pair, profile: EngineProfile) -> str:
    speculation = spec.speculation
    mapped = profile.maps_vocabularies or spec.accelerator.type is AcceleratorType.CPU
    if speculation is None or speculation.method is not Method.DRAFT_MODEL or not mapped:
        return ""
    asked = speculation.model_copy(update={"use_heterogeneous_vocab": True})
    tried = replace(pair, maps_vocabulary=True)
    refused = pairing_problems(spec.model_copy(update={"speculation": asked}), tried, profile)
    return "" if refused else "without useHeterogeneousVocab "


def _other_head(target: ModelGeometry, method: Method) -> str:
    sized = (head.geometry.name for head in known_heads(target.name) if head.method == method)
    named = (each.draft for each in known_drafts(target.name) if each.method == method and each.draft is not None)
    known = next(chain(sized, named), None)
    return f"choose a head that was made for {target.name}" + (f", such as {known}" if known else "")


def _other_draft(spec: SpecDecodeDeploymentSpec, pair: Pair, profile: EngineProfile) -> str:
    speculation = spec.speculation
    if speculation is None or speculation.draft is None or pair.draft is None:
        return "use method: none"
    for other in matching_drafts(pair.target, pair.draft):
        draft = speculation.draft.model_copy(update={"model": other.name, "config": None, "checkpoints": []})
        asked = spec.model_copy(update={"speculation": speculation.model_copy(update={"draft": draft})})
        tried = replace(pair, draft=other, draft_precision=Precision.BF16)
        tensor = spec.parallelism.tensor
        if not pairing_problems(asked, tried, profile) and not (tensor and tensor_problems(other, tensor)):
            return f"choose {other.name}, which has {other.vocab_size}"
    return f"choose a draft whose vocab_size is {pair.target.vocab_size}, or use method: ngram, which needs no draft"


def _draft_problems(spec: SpecDecodeDeploymentSpec, method: Method, pair: Pair) -> Iterator[Problem]:
    draft = spec.speculation.draft if spec.speculation else None
    if draft is None:
        return
    # Heads are served in their stored precision, because sizing does not model online quantization of heads.
    stored = f"the head of method {method} is served in its own precision: remove"
    if method is not Method.DRAFT_MODEL and draft.quantization is not Quantization.AS_CHECKPOINT:
        yield Problem(f"{DRAFT}.quantization", draft.quantization, f"{stored} it")
    if method is not Method.DRAFT_MODEL and draft.checkpoints:
        yield Problem(f"{DRAFT}.checkpoints", f"{len(draft.checkpoints)} checkpoints", f"{stored} them")
    if pair.draft is None or method in GETS_LONGER:
        return
    # vllm/config/speculative.py, _maybe_override_draft_max_model_len: not beyond the draft's own.
    longest = longest_sequence(pair.draft, pair.limits.engine_version)
    if draft.max_model_len is not None and draft.max_model_len > longest:
        message = f"{pair.draft.name} was made for at most {longest} tokens: use that or less"
        yield Problem(f"{DRAFT}.maxModelLen", str(draft.max_model_len), message)


def _state_problems(
    spec: SpecDecodeDeploymentSpec, method: Method, target: ModelGeometry, profile: EngineProfile
) -> Iterator[Problem]:
    limits, pipeline = profile.targets, spec.parallelism.pipeline
    if pipeline > 1 and target.architecture in limits.without_stages:
        message = f"vLLM cannot cut {target.architecture} into stages: use 1"
        yield Problem("spec.parallelism.pipeline", str(pipeline), message)
    if method not in _READS_INNER_STATES:
        return
    if target.architecture in limits.without_hidden_states:
        message = (
            f"reads hidden states of inner layers, which vLLM {profile.version} does not hand out for "
            f"{target.architecture}: use draft_model or ngram"
        )
        yield Problem("spec.speculation.method", method, message)
    elif pipeline > 1 and target.architecture not in limits.with_hidden_states_over_stages:
        message = (
            f"method {method} reads hidden states of inner layers, which vLLM {profile.version} does not hand on "
            f"between stages for {target.architecture}: use 1"
        )
        yield Problem("spec.parallelism.pipeline", str(pipeline), message)


def _count_problems(pair: Pair) -> Iterator[Problem]:
    try:
        loaded_draft(pair)
    except PlanError as error:
        yield Problem(f"spec.{error.field}", shown_or_missing(error.value), error.message)


def _refiner_problems(spec: SpecDecodeDeploymentSpec, pair: Pair) -> Iterator[Problem]:
    """Yield problems of XPress heads and of their settings (vllm/config/speculative.py, __post_init__)."""
    speculation, draft = spec.speculation, pair.draft
    if speculation is None or draft is None:
        return
    asked, field = speculation.xpress_top_c, "spec.speculation.xpressTopC"
    if draft.head is None or draft.head.refiner is None:
        if asked is not None:
            yield Problem(field, str(asked), f"{draft.name} has no XPress refiner: remove it")
        return
    if asked is not None and asked > draft.vocab_size:
        message = f"is above the vocabulary of {draft.name}: use {draft.vocab_size} or less, or 0 for all"
        yield Problem(field, str(asked), message)
    if pair.samples_drafts:
        # vllm/v1/worker/gpu/spec_decode/xpress/speculator.py: _jacobi_refine writes no logits for verification.
        message = f"{draft.name} only proposes the likeliest tokens, but vLLM would verify them as sampled: remove it"
        yield Problem("spec.speculation.draftSampling", DraftSampling.PROBABILISTIC, message)
    if runs_on_v1(spec, pair):
        # vllm/config/vllm.py, _get_v1_model_runner_unsupported_features.
        message = "is an XPress head, which needs vLLM's model runner V2, and V1 serves here: use a dflash head without"
        yield Problem(f"{DRAFT}.model", draft.name, message)


def _class_problems(spec: SpecDecodeDeploymentSpec, method: Method, pair: Pair) -> Iterator[Problem]:
    """Yield draft classes that are not in this version's registry, or not supported on CPU.

    vllm/model_executor/models/registry.py.
    """
    draft, version = pair.draft, pair.limits.engine_version
    if draft is None or draft_heads.method_of_head(draft) is not method or (draft.head and draft.head.refiner):
        return
    if instead := draft_heads.missing_class(draft.architecture, method, version):
        yield Problem(f"{DRAFT}.model", draft.name, instead)
    elif draft_heads.draft_class(draft) == draft_heads.DFLASH2 and spec.accelerator.type is AcceleratorType.CPU:
        # vllm/config/vllm.py, use_v2_model_runner: it forces V2, which the CPU does not have.
        message = "is a DFlash 2 head, which needs vLLM's model runner V2, and V1 serves on CPU: use a dflash head"
        yield Problem(f"{DRAFT}.model", draft.name, message)


def _assistant_problems(spec: SpecDecodeDeploymentSpec, pair: Pair) -> Iterator[Problem]:
    """Yield problems of Gemma 4 assistants, which read the target's keys and values.

    vllm/v1/worker/gpu/spec_decode/gemma4/speculator.py, _setup_gemma4_kv_sharing and _share_embeddings.
    """
    speculation, draft, target = spec.speculation, pair.draft, pair.target
    if speculation is None or draft is None or not draft.architecture.startswith(draft_heads.ASSISTANTS):
        return
    if not target.architecture.startswith("Gemma4"):
        message = f"reads keys and values of a Gemma 4 target, and {target.name} is not one: use another draft"
        yield Problem(f"{DRAFT}.model", draft.name, message)
    if spec.parallelism.pipeline > 1:
        message = f"vLLM does not share the embedding of {target.name} with {draft.name} over stages: use 1"
        yield Problem("spec.parallelism.pipeline", str(spec.parallelism.pipeline), message)
    if speculation.draft_lm_head_quantization is not None:
        # vllm/config/speculative.py, _verify_args.
        message = f"{draft.name} has its own output head: remove it"
        yield Problem("spec.speculation.draftLmHeadQuantization", speculation.draft_lm_head_quantization, message)


def _package_problems(spec: SpecDecodeDeploymentSpec, method: Method, profile: EngineProfile) -> Iterator[Problem]:
    """Yield methods that need a package which vLLM's images do not contain."""
    package = profile.method_packages.get(method)
    if package is not None and spec.engine.image is None:
        message = f"method {method} needs {package}, which vLLM's own image lacks: name an image that holds it"
        yield Problem("spec.engine.image", "absent", message)


def _split_problems(spec: SpecDecodeDeploymentSpec, method: Method, pair: Pair) -> Iterator[Problem]:
    asked = spec.parallelism
    on_cpu = spec.accelerator.type is AcceleratorType.CPU
    if asked.draft_tensor is not None and method not in METHODS_WITH_LAYERS:
        message = "there is no draft to split: remove it, or choose a method with a draft"
        yield Problem("spec.parallelism.draftTensor", str(asked.draft_tensor), message)
    elif (asked.draft_tensor == 1 and not on_cpu and not asked.tensor) and (
        method is Method.DRAFT_MODEL and pair.era.runner is Runner.V1
    ):
        # The plan would choose the target's split regardless of draftTensor, and the engine fails if both differ
        # (v1/spec_decode/draft_model.py).
        message = (
            f"vLLM {pair.limits.engine_version} splits a draft model like its target, whose split is left to the plan: "
            "remove it, or set parallelism.tensor to 1 as well"
        )
        yield Problem("spec.parallelism.draftTensor", "1", message)
    if not on_cpu:
        return
    if asked.pipeline * asked.data > 1 or asked.expert:
        groups = f"{asked.pipeline * asked.data} groups"
        yield Problem("spec.parallelism", groups, "a replica on CPU can only be split by tensor: remove the others")
    tensor, given = asked.tensor or 1, spec.accelerator.kv_cache_gib or 0
    if given % tensor:
        # vllm/platforms/cpu.py, check_and_update_config: a rank's KV space is given in whole GiB.
        message = f"must be a multiple of parallelism.tensor, {tensor}: each rank gets a whole number of GiB"
        yield Problem("spec.accelerator.kvCacheGiB", str(given), message)


_TRUSTS: Final = "--trust-remote-code"


def class_problems(spec: SpecDecodeDeploymentSpec, pair: Pair, profile: EngineProfile) -> Iterator[Problem]:
    """Yield the models whose class the engine rejects."""
    for fix, problem in _unregistered(spec, pair, profile):
        if fix is not None:
            yield replace(problem, message=f"{problem.message}: {fix}")


def class_doubts(spec: SpecDecodeDeploymentSpec, pair: Pair, profile: EngineProfile) -> Iterator[Problem]:
    """Yield the models with an unregistered class that may run through transformers or with the model's own code."""
    for fix, problem in _unregistered(spec, pair, profile):
        if fix is None:
            instead = "vLLM may run it through the image's transformers, or with code from the model's folder"
            yield replace(problem, message=f"{problem.message}; {instead}")


def _unregistered(
    spec: SpecDecodeDeploymentSpec, pair: Pair, profile: EngineProfile
) -> Iterator[tuple[str | None, Problem]]:
    """Yield the models whose class is not registered, each with the fix if the engine rejects it."""
    geometries, trusts = {TARGET: pair.target, DRAFT: pair.draft}, last_option(_TRUSTS, spec.engine.extra_args, profile)
    for field, served in served_models(spec).items():
        model = geometries[field]
        found = None if model is None else draft_heads.unregistered_model(model, profile.version)
        if found is None:
            continue
        fix = found.fix if found.refused and (trusts is None or trusts.negated) else None
        if served.config is not None:
            yield fix, Problem(f"{field}.config.architectures", found.architecture, found.why)
        else:
            yield fix, Problem(f"{field}.model", served.model, f"its class {found.architecture} {found.why}")
