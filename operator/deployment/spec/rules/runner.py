"""What vLLM's two model runners make of a draft: what V1 says only after loading, and what neither says."""

from collections.abc import Iterator
from typing import Final

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.values import METHODS_WITH_LAYERS, AcceleratorType
from specdecode_operator.deployment.spec.model_sources import DRAFT
from specdecode_operator.engine.profiles import EngineProfile
from specdecode_operator.problems import Problem
from specdecode_operator.sizing.base.eras import Runner
from specdecode_operator.sizing.base.errors import SizingError
from specdecode_operator.sizing.kv.layout import cache_layout
from specdecode_operator.sizing.model.geometry import ModelGeometry
from specdecode_operator.sizing.pair.pair import Pair, Parallelism
from specdecode_operator.vocabulary import Method

_DRAFTS_IN_ONE_GROUP: Final = (Method.DRAFT_MODEL, Method.EAGLE, Method.EAGLE3)
"""Methods whose draft model runner V1 runs, all layers by one table of blocks."""

_SEVERAL_DIMENSIONS: Final = ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3_5")
"""Beginnings of architectures whose positions have several dimensions, also where a config.json leaves that out."""

_LARGEST_TENSOR: Final = 8

_NOT_OFF: Final = (
    "0 tokens are not off: the draft keeps its memory, and one that is starved meanwhile resumes with collapsed"
    " acceptance, so use 1 in place of 0, or speculation.method none"
)
"""Starved drafts: NVIDIA/TensorRT-LLM#16888. What 0 tokens cost in vLLM: vllm-project/vllm#49548."""


def runs_on_v1(spec: SpecDecodeDeploymentSpec, pair: Pair) -> bool:
    """Whether model runner V1 serves a pair: on the CPU always (vllm/config/vllm.py, use_v2_model_runner)."""
    return spec.accelerator.type is AcceleratorType.CPU or pair.era.runner is Runner.V1


def draft_is_split_alike(method: Method, pair: Pair) -> bool:
    """Whether a GPU's engine fails with a draft split otherwise than its target (v1/spec_decode/draft_model.py)."""
    return method is Method.DRAFT_MODEL and pair.era.runner is Runner.V1


def runner_problems(spec: SpecDecodeDeploymentSpec, method: Method, pair: Pair) -> Iterator[Problem]:
    """Return why model runner V1 would fail with this draft beside this target."""
    draft = pair.draft
    if draft is None or not runs_on_v1(spec, pair):
        return
    version = pair.limits.engine_version
    if method is Method.DRAFT_MODEL and _has_several_dimensions(draft):
        # vllm/v1/spec_decode/llm_base_proposer.py, _raise_if_mrope.
        message = (
            f"has positions in several dimensions (M-RoPE), which vLLM {version} does not draft with here: use a draft "
            "for text alone, or method ngram"
        )
        yield Problem(f"{DRAFT}.model", draft.name, message)
    groups = _groups_of_draft(spec, pair) if method in _DRAFTS_IN_ONE_GROUP else 1
    if groups > 1:
        # vllm/v1/spec_decode/llm_base_proposer.py, validate_same_kv_cache_group.
        message = (
            f"its layers lie in {groups} groups of the KV cache beside {pair.target.name}, and vLLM {version} drafts "
            "only from one here: use a draft whose layers all attend alike, or method ngram"
        )
        yield Problem(f"{DRAFT}.model", draft.name, message)


def schedule_notes(spec: SpecDecodeDeploymentSpec, profile: EngineProfile, pair: Pair) -> list[str]:
    """Return what lengths that change with the number of requests mean for graphs, and for what is drafted."""
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
    effects += _still_drafted(speculation.method, profile, pair, on_v1=on_v1)
    runner = Runner.V1 if on_v1 else Runner.V2
    start = f"with numSpeculativeTokensByBatchSize on model runner {runner} of vLLM {pair.limits.engine_version}"
    return [f"{start}, {'; '.join(effects)}"] if effects else []


def _still_drafted(method: Method, profile: EngineProfile, pair: Pair, *, on_v1: bool) -> list[str]:
    """Return what is drafted where fewer tokens are asked for.

    For V1: vllm/v1/spec_decode/llm_base_proposer.py, propose. For V2 the table of versions names the source.
    """
    if method not in METHODS_WITH_LAYERS or method is Method.MEDUSA:
        return []
    not_off = [_NOT_OFF] if 0 in pair.other_draft_lengths else []
    if not on_v1 and method not in profile.shortens_drafts_on_v2:
        tokens = pair.num_speculative_tokens
        still = f"the draft still proposes {tokens} tokens each step, and what is too much is dropped unverified"
        return [still, *not_off]
    if not_off:
        return ["for 0 tokens the draft still runs once each step, to keep its KV cache up", *not_off]
    return []


def _has_several_dimensions(draft: ModelGeometry) -> bool:
    """vllm/transformers_utils/config.py, uses_mrope."""
    several = any(key == "mrope_section" for rope in draft.ropes for key, _ in rope.parameters)
    return several or draft.architecture.startswith(_SEVERAL_DIMENSIONS)


def _groups_of_draft(spec: SpecDecodeDeploymentSpec, pair: Pair) -> int:
    """Return over how many groups the draft's layers are spread; the fewest where the plan chooses the split."""
    asked = spec.parallelism
    tensors = [asked.tensor] if asked.tensor else [1 << power for power in range(_LARGEST_TENSOR.bit_length())]
    found = []
    for tensor in tensors:
        try:
            layout = cache_layout(pair, Parallelism(tensor, asked.pipeline))
        except SizingError:  # other rules say so
            continue
        found.append(max(stage.groups_of_draft for stage in layout))
    return min(found, default=1)
