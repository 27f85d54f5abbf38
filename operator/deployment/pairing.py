"""What of a target and its draft does not go together, found before any GPU is taken."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.values import METHODS_WITH_LAYERS, AcceleratorType, DraftSampling, Quantization
from specdecode_operator.deployment.spec.model_sources import DRAFT, TARGET
from specdecode_operator.deployment.spec.rules.runner import draft_is_split_alike, runner_problems, runs_on_v1
from specdecode_operator.engine.profiles import EngineProfile
from specdecode_operator.problems import Problem, shown_or_missing
from specdecode_operator.sizing.base.errors import PlanError
from specdecode_operator.sizing.choice.other_models import known_heads, matching_drafts
from specdecode_operator.sizing.families.catalogue import made_for
from specdecode_operator.sizing.families.heads import ASSISTANTS, DFLASH2, draft_class, method_of_head, missing_class
from specdecode_operator.sizing.model.geometry import ModelGeometry
from specdecode_operator.sizing.pair.drafting import vocabulary_mismatch
from specdecode_operator.sizing.pair.pair import Pair, loaded_draft, longest_sequence
from specdecode_operator.sizing.weights.divisibility import tensor_problems
from specdecode_operator.vocabulary import (
    METHODS_OF_BLOCKS,
    METHODS_TAKING_DRAFT,
    Method,
    Precision,
)

_METHOD: Final = "spec.speculation.method"

_READS_INNER_STATES: Final = (Method.EAGLE3, Method.DFLASH, Method.DSPARK)
"""Methods that read hidden states of the target's inner layers."""

_LENDS_TO_ASSISTANTS: Final = "Gemma4"

GETS_LONGER: Final = (Method.EAGLE, Method.EAGLE3, Method.MEDUSA)
"""Methods whose head goes as far as the target, whatever its file says (config/speculative.py), or keeps no length."""


def pairing_problems(spec: SpecDecodeDeploymentSpec, pair: Pair, profile: EngineProfile) -> list[Problem]:
    """Return why the engine would not start, or never accept a token, with this draft beside this target."""
    method = spec.speculation.method if spec.speculation else Method.NONE
    return [
        *_role_problems(spec, method, pair),
        *_match_problems(spec, method, pair, profile),
        *_precision_problems(spec, method),
        *_length_problems(spec, method, pair),
        *_state_problems(spec, method, pair.target, profile),
        *_count_problems(pair),
        *_refiner_problems(spec, pair),
        *_class_problems(spec, method, pair),
        *_assistant_problems(spec, pair),
        *_package_problems(spec, method, profile),
        *_split_problems(spec, method, pair),
        *_copies_problems(spec, method, pair, profile),
        *runner_problems(spec, method, pair),
    ]


def _copies_problems(
    spec: SpecDecodeDeploymentSpec, method: Method, pair: Pair, profile: EngineProfile
) -> Iterator[Problem]:
    """Copies that share experts compute in step: vllm/forward_context.py, DPMetadata.make, compares their tokens."""
    data, version = spec.parallelism.data, profile.version
    fails = method in METHODS_OF_BLOCKS and not profile.drafts_blocks_over_copies and not runs_on_v1(spec, pair)
    if fails and data > 1 and pair.target.has_experts:
        message = (
            f"vLLM {version} ends at its start with method {method} and copies of {pair.target.name}, which has"
            " experts: use 1, or vLLM 0.30 or newer"
        )
        yield Problem("spec.parallelism.data", str(data), message)


def _role_problems(spec: SpecDecodeDeploymentSpec, method: Method, pair: Pair) -> Iterator[Problem]:
    """Heads and models in each other's place: vLLM loads a head only with the target that it was made for."""
    target, draft = pair.target, pair.draft
    if (drafts_by := method_of_head(target)) is not None:
        verifier = next(iter(made_for(target)), "the model that it was made for")
        message = f"is a draft head: name {verifier}, and this one as speculation.draft.model with method: {drafts_by}"
        yield Problem(f"{TARGET}.model", target.name, message)
    if draft is None or method not in METHODS_TAKING_DRAFT:
        return
    proposes_by = method_of_head(draft)
    if draft.head is None and method not in (Method.DRAFT_MODEL, Method.MTP):
        named = _other_head(target, method)
        refused = vocabulary_mismatch(target, draft) or any(runner_problems(spec, Method.DRAFT_MODEL, pair))
        otherwise = "" if refused else ", or use method: draft_model"
        message = f"is a model of its own, and method {method} needs a head: {named}{otherwise}"
        yield Problem(f"{DRAFT}.model", draft.name, message)
    elif proposes_by is not None and method is Method.DRAFT_MODEL:
        message = (
            f"is a draft head, and method {method} needs a model of its own: use method: {proposes_by}, or name one"
        )
        yield Problem(f"{DRAFT}.model", draft.name, message)
    elif proposes_by not in (None, method) and not draft.is_made_up:
        message = f"is a head for method {proposes_by}: use that, or name a head for {method}"
        yield Problem(f"{DRAFT}.model", draft.name, message)


def _match_problems(
    spec: SpecDecodeDeploymentSpec, method: Method, pair: Pair, profile: EngineProfile
) -> Iterator[Problem]:
    """Width and vocabulary, which the draft must have in common with the target.

    vllm/model_executor/models/llama_eagle3.py joins hidden states by a matrix of the width that the head was made for.
    """
    target, draft = pair.target, pair.draft
    if draft is None or method not in METHODS_TAKING_DRAFT:
        return
    head = draft.head
    # Of Medusa the engine makes the vocabulary that the target has (config/speculative.py).
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
    """Return the field that would let vocabularies differ, as a refusal says it; nothing if refused all the same."""
    speculation = spec.speculation
    mapped = profile.maps_vocabularies or spec.accelerator.type is AcceleratorType.CPU
    if speculation is None or speculation.method is not Method.DRAFT_MODEL or not mapped:
        return ""
    asked = speculation.model_copy(update={"use_heterogeneous_vocab": True})
    tried = replace(pair, maps_vocabulary=True)
    refused = pairing_problems(spec.model_copy(update={"speculation": asked}), tried, profile)
    return "" if refused else "without useHeterogeneousVocab "


def _other_head(target: ModelGeometry, method: Method) -> str:
    known = next((head.geometry.name for head in known_heads(target.name) if head.method == method), None)
    return f"choose a head that was made for {target.name}" + (f", such as {known}" if known else "")


def _other_draft(spec: SpecDecodeDeploymentSpec, pair: Pair, profile: EngineProfile) -> str:
    """Return what to draft with instead: the smallest model with the target's vocabulary that passes all rules."""
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
    return f"choose a draft whose vocab_size is {pair.target.vocab_size}, or use method: ngram, which needs none"


def _precision_problems(spec: SpecDecodeDeploymentSpec, method: Method) -> Iterator[Problem]:
    """A head is served as it was stored: what vLLM would make of it while loading is not known to sizing."""
    draft = spec.speculation.draft if spec.speculation else None
    if draft is None or method is Method.DRAFT_MODEL:
        return
    if draft.quantization is not Quantization.AS_CHECKPOINT:
        message = f"the head of method {method} is served as it was stored: remove it"
        yield Problem(f"{DRAFT}.quantization", draft.quantization, message)
    if draft.checkpoints:
        message = f"the head of method {method} is served as it was stored: remove them"
        yield Problem(f"{DRAFT}.checkpoints", f"{len(draft.checkpoints)} checkpoints", message)


def _length_problems(spec: SpecDecodeDeploymentSpec, method: Method, pair: Pair) -> Iterator[Problem]:
    """vllm/config/speculative.py, _maybe_override_draft_max_model_len: not beyond the draft's own."""
    draft = spec.speculation.draft if spec.speculation else None
    if draft is None or pair.draft is None or method in GETS_LONGER:
        return
    longest = longest_sequence(pair.draft, pair.limits.engine_version)
    if draft.max_model_len is not None and draft.max_model_len > longest:
        message = f"{pair.draft.name} was made for at most {longest} tokens: use that or less"
        yield Problem(f"{DRAFT}.maxModelLen", str(draft.max_model_len), message)


def _state_problems(
    spec: SpecDecodeDeploymentSpec, method: Method, target: ModelGeometry, profile: EngineProfile
) -> Iterator[Problem]:
    """What the target's class in vLLM does not do; the engine says so after loading."""
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
        yield Problem(_METHOD, method, message)
    elif pipeline > 1 and target.architecture not in limits.with_hidden_states_over_stages:
        message = (
            f"method {method} reads hidden states of inner layers, which vLLM {profile.version} does not hand on "
            f"between stages for {target.architecture}: use 1"
        )
        yield Problem("spec.parallelism.pipeline", str(pipeline), message)


def _count_problems(pair: Pair) -> Iterator[Problem]:
    """What sizing knows of K, and of layers for multi-token prediction."""
    try:
        loaded_draft(pair)
    except PlanError as error:
        yield Problem(f"spec.{error.field}", shown_or_missing(error.value), error.message)


def _refiner_problems(spec: SpecDecodeDeploymentSpec, pair: Pair) -> Iterator[Problem]:
    """What an XPress head wants, and what only such a head has (vllm/config/speculative.py, __post_init__)."""
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
        # vllm/v1/worker/gpu/spec_decode/xpress/speculator.py, _jacobi_refine writes no logits to check by.
        message = f"{draft.name} proposes the likeliest alone, and vLLM would check them as if by chance: remove it"
        yield Problem("spec.speculation.draftSampling", DraftSampling.PROBABILISTIC, message)
    if runs_on_v1(spec, pair):
        # vllm/config/vllm.py, _get_v1_model_runner_unsupported_features.
        message = "is an XPress head, which needs vLLM's model runner V2, and V1 serves here: use a dflash head without"
        yield Problem(f"{DRAFT}.model", draft.name, message)


def _class_problems(spec: SpecDecodeDeploymentSpec, method: Method, pair: Pair) -> Iterator[Problem]:
    """What the registry of this version lacks (vllm/model_executor/models/registry.py), and what runs on one runner."""
    draft, version = pair.draft, pair.limits.engine_version
    if draft is None or method_of_head(draft) is not method or (draft.head and draft.head.refiner):
        return
    if instead := missing_class(draft.architecture, method, version):
        yield Problem(f"{DRAFT}.model", draft.name, instead)
    elif draft_class(draft) == DFLASH2 and spec.accelerator.type is AcceleratorType.CPU:
        # vllm/config/vllm.py, use_v2_model_runner: it forces V2, which the CPU does not have.
        message = "is a DFlash 2 head, which needs vLLM's model runner V2, and V1 serves on CPU: use a dflash head"
        yield Problem(f"{DRAFT}.model", draft.name, message)


def _assistant_problems(spec: SpecDecodeDeploymentSpec, pair: Pair) -> Iterator[Problem]:
    """What an assistant of Gemma 4 needs, which reads the target's keys and values.

    vllm/v1/worker/gpu/spec_decode/gemma4/speculator.py, _setup_gemma4_kv_sharing and _share_embeddings.
    """
    speculation, draft, target = spec.speculation, pair.draft, pair.target
    if speculation is None or draft is None or not draft.architecture.startswith(ASSISTANTS):
        return
    if not target.architecture.startswith(_LENDS_TO_ASSISTANTS):
        message = f"reads keys and values of a Gemma 4 target, and {target.name} is not one: use another draft"
        yield Problem(f"{DRAFT}.model", draft.name, message)
    if spec.parallelism.pipeline > 1:
        message = f"vLLM does not share the embedding of {target.name} with {draft.name} over stages: use 1"
        yield Problem("spec.parallelism.pipeline", str(spec.parallelism.pipeline), message)
    if speculation.draft_lm_head_quantization is not None:
        # vllm/config/speculative.py, _verify_args.
        message = f"{draft.name} has an output head of its own: remove it"
        yield Problem("spec.speculation.draftLmHeadQuantization", speculation.draft_lm_head_quantization, message)


def _package_problems(spec: SpecDecodeDeploymentSpec, method: Method, profile: EngineProfile) -> Iterator[Problem]:
    """VLLM's own images lack what some methods need."""
    package = profile.method_packages.get(method)
    if package is not None and spec.engine.image is None:
        message = f"method {method} needs {package}, which vLLM's own image lacks: name an image that holds it"
        yield Problem("spec.engine.image", "absent", message)


def _split_problems(spec: SpecDecodeDeploymentSpec, method: Method, pair: Pair) -> Iterator[Problem]:
    """Fields of spec.parallelism that nothing here could follow."""
    asked = spec.parallelism
    on_cpu = spec.accelerator.type is AcceleratorType.CPU
    if asked.draft_tensor is not None and method not in METHODS_WITH_LAYERS:
        message = "there is no draft to split: remove it, or choose a method with a draft"
        yield Problem("spec.parallelism.draftTensor", str(asked.draft_tensor), message)
    elif asked.draft_tensor == 1 and not on_cpu and not asked.tensor and draft_is_split_alike(method, pair):
        # The plan would choose the target's split without a thought of what the draft was told.
        message = (
            f"vLLM {pair.limits.engine_version} splits a draft model like its target, whose split is left to the plan: "
            "remove it, or set parallelism.tensor to 1 as well"
        )
        yield Problem("spec.parallelism.draftTensor", "1", message)
    if not on_cpu:
        return
    if asked.pipeline * asked.data > 1 or asked.expert:
        groups = f"{asked.pipeline * asked.data} groups"
        yield Problem("spec.parallelism", groups, "a replica on CPU is split by tensor alone: remove the others")
    tensor, given = asked.tensor or 1, spec.accelerator.kv_cache_gib or 0
    if given % tensor:
        # vllm/platforms/cpu.py, check_and_update_config: a rank's KV space is given in whole GiB.
        message = f"must be a multiple of parallelism.tensor, {tensor}: each rank gets a whole number of GiB"
        yield Problem("spec.accelerator.kvCacheGiB", str(given), message)
