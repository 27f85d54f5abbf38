"""The unit of sizing: a target, its draft, their parallelism and the engine's limits."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Final, TypeVar

from specdecode_operator.enums import METHODS_IN_PARALLEL, METHODS_OF_BLOCKS, SIXTEEN_BIT_BYTES, Method, Precision
from specdecode_operator.sizing.calibration import UNCALIBRATED, Calibration
from specdecode_operator.sizing.catalogue import builds_with_own_draft
from specdecode_operator.sizing.config_fields import MAX_TOKENS
from specdecode_operator.sizing.errors import PlanError
from specdecode_operator.sizing.families.draft_heads import HOLDS_DSPARK, dspark_head, mtp_head
from specdecode_operator.sizing.geometry import (
    TOKEN_ID_BYTES,
    ModelGeometry,
    computed_in,
    padded_vocabulary,
    stretched_length,
)
from specdecode_operator.sizing.rank_layers import Split
from specdecode_operator.sizing.result_cache import MEMO_SIZE
from specdecode_operator.sizing.version_rules import (
    NEWEST_VERSION,
    ModelTraits,
    Runner,
    VersionRules,
    find_version_rules,
    multiplies_yarn,
    sizing_facts,
)

TENSOR_FIELD: Final = "parallelism.tensor"
PIPELINE_FIELD: Final = "parallelism.pipeline"
_DRAFT_FIELD: Final = "speculation.draft.model"
_TOKENS_FIELD: Final = "speculation.numSpeculativeTokens"

NO_LENGTH: Final = "is missing, and the model has no maximum length: set it, such as 8192"
"""Problem of a missing length of a model with `says_no_length`."""

_PADDED_AT_MOST: Final = 1024
"""Maximum difference of vocabularies of one family that were padded to different multiples."""

_TIED_ON_ONE_STAGE: Final = "Ernie4_5_MoeForCausalLM"
"""Class that ties an output head which only the last stage has (vLLM up to 0.33, ernie45_moe.py)."""

_STRETCHED_IN_FILE: Final = "Gemma3"
"""Its max_position_embeddings is multiplied already (vLLM, config/model.py, _get_and_verify_max_len)."""


@dataclass(frozen=True)
class EngineLimits:
    """Settings of the engine that decide its memory, and whether it has kernels."""

    max_model_len: int  # Longest sequence in tokens
    max_num_seqs: int
    max_num_batched_tokens: int  # Tokens scheduled in one step
    block_size: int  # Tokens in one KV cache block
    kv_cache_element_bytes: int | None  # None for the model's own type
    memory_utilization_percent: float  # Of the GPU's memory
    enforce_eager: bool
    min_concurrency: int  # Requests of max_model_len that must fit at once
    engine_version: str = NEWEST_VERSION
    dtype_bytes: int = SIXTEEN_BIT_BYTES  # Bytes of an unquantized element, in target and draft
    prefix_caching: bool = True
    graph_mode: str | None = None  # vLLM's CUDAGraphMode (config/compilation.py); None for the engine's own
    max_graph_tokens: int | None = None  # Maximum tokens of a captured step; None for the engine's own
    attention_backend: str | None = None  # By vLLM's name; None for the engine's own choice
    has_nvlink: bool = True  # Whether NVLink may join its GPUs
    compiles_anew: bool = False  # Whether the start finds no compile cache, as the first one on a machine
    may_run_fewer: bool = False  # Whether max_num_seqs may be lowered to the maximum that a model with states allows

    @property
    def captures_graphs(self) -> bool:
        """True if any step runs as a CUDA graph."""
        return not self.enforce_eager and self.graph_mode != "NONE"

    @property
    def has_own_graphs(self) -> bool:
        """True if the engine itself decides which CUDA graphs it captures."""
        return self.graph_mode is None and self.max_graph_tokens is None


@dataclass(frozen=True)
class Parallelism:
    """Parallelism of one replica. If the plan chooses the tensor parallelism, it is 1 until then."""

    tensor: int = 1  # GPUs that share each layer
    pipeline: int = 1  # Stages of layers
    data: int = 1  # Copies of all but the experts
    expert: bool = False  # Whether whole experts are spread over tensor x data GPUs

    @property
    def groups(self) -> int:
        """Groups of GPUs that share layers."""
        return self.pipeline * self.data

    def at(self, tensor: int) -> "Parallelism":
        """Return it with another tensor parallelism."""
        return parallelism(tensor, self.pipeline, self.data, self.expert)

    @property
    def each_copy(self) -> str:
        """Suffix of figures of the KV cache or of requests, which are per data-parallel replica."""
        return " per copy" if self.data > 1 else ""

    @property
    def gpus(self) -> int:
        """GPUs of one replica."""
        return self.tensor * self.groups

    @property
    def layer_split(self) -> Split:
        """Split of each layer over ranks."""
        return Split(self.tensor, self.tensor * self.data if self.expert else 1, self.data)

    @property
    def label(self) -> str:
        """Short name: ``TP 2``, or ``TP 4, PP 2, DP 2, EP``."""
        parts = [f"TP {self.tensor}"]
        parts += [f"PP {self.pipeline}"] * (self.pipeline > 1) + [f"DP {self.data}"] * (self.data > 1)
        return ", ".join(parts + ["EP"] * self.expert)


TENSOR_ONLY: Final = Parallelism()


@lru_cache(maxsize=MEMO_SIZE)
def parallelism(tensor: int, pipeline: int = 1, data: int = 1, expert: bool = False) -> Parallelism:
    """Return always the same object for the same numbers, as caches like it."""
    return Parallelism(tensor, pipeline, data, expert)


def spread_problems(target: ModelGeometry, spread: Parallelism, version: str) -> tuple[PlanError, ...]:
    """Return the errors of spreading a target over stages and experts, independent of its tensor parallelism."""
    found, name, layers = [], target.name, target.num_layers
    if spread.pipeline > layers:
        message = f"{name} has {layers} layers, and each stage needs one: use {layers} or less"
        found.append(PlanError(PIPELINE_FIELD, spread.pipeline, message))
    elif spread.pipeline > 1 and target.architecture.startswith(tuple(sizing_facts(version)["unstaged_targets"])):
        message = f"vLLM {version} does not start with {name} on several stages: use 1, or vLLM 0.30 or newer"
        found.append(PlanError(PIPELINE_FIELD, spread.pipeline, message))
    elif spread.pipeline > 1 and target.architecture == _TIED_ON_ONE_STAGE and target.tie_word_embeddings:
        message = f"vLLM does not start with {name} on several stages, because its embeddings are tied: use 1"
        found.append(PlanError(PIPELINE_FIELD, spread.pipeline, message))
    # vllm/config/model.py, _verify_with_expert_parallelism.
    if spread.expert and not target.has_experts and not target.is_made_up:
        found.append(PlanError("parallelism.expert", spread.expert, f"{name} has no experts to spread: remove it"))
    return tuple(found)


@dataclass(frozen=True)
class AdapterSlots:
    """What vLLM reserves for LoRA adapters, whichever it loads."""

    gpu: int  # --max-loras
    host: int  # --max-cpu-loras
    rank: int  # --max-lora-rank
    modules: frozenset[str] = frozenset()  # --lora-target-modules; empty: all layers
    fully_sharded: bool = False  # --fully-sharded-loras


@dataclass(frozen=True)
class Pair:
    """A target, how tokens are proposed for it, and the engine's limits."""

    target: ModelGeometry
    target_precision: Precision
    # The draft model or head, for methods with a checkpoint of their own
    draft: ModelGeometry | None
    draft_precision: Precision | None
    method: str  # A Method
    num_speculative_tokens: int  # Tokens proposed a step; 0 for method none
    limits: EngineLimits
    calibration: Calibration = UNCALIBRATED
    maps_vocabulary: bool = False  # Whether the engine maps the tokens of a draft with another vocabulary
    samples_drafts: bool = False  # Whether the draft samples its tokens, so that its logits are kept
    # Other numbers of proposed tokens, 0 among them, that the engine changes to by the number of requests
    other_draft_lengths: frozenset[int] = frozenset()
    adaptive_verification: bool = False  # Whether each step verifies only the proposed tokens that are worth it
    checks_by_entropy: bool = False  # Whether tokens pass that the target would have rejected, by its entropy
    # Quantization of the draft's copy of the target's output head: fp8 or nvfp4; None if they share it
    draft_head_quantization: str | None = None
    refined_candidates: int | None = None  # Tokens that a refiner chooses from, 0 for all; None for its file's number
    adapters: AdapterSlots | None = None  # Slots for LoRA adapters of the target; None if the engine serves none

    def __post_init__(self) -> None:
        """Let both models compute in the engine's type (config/speculative.py: the draft gets the target's)."""
        for role in ("target", "draft"):
            model = getattr(self, role)
            if model is not None:
                object.__setattr__(self, role, computed_in(model, self.limits.dtype_bytes))

    def with_requests(self, max_num_seqs: int, max_model_len: int) -> "Pair":
        """Return a copy of the pair with these request limits, five times as fast as `dataclasses.replace`."""
        limits = _changed(self.limits, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
        changed = _changed(self, limits=limits)
        # Some heads have a position table with `max_model_len` rows. The cached `era` does not depend on the limits.
        vars(changed).pop("loaded_draft", None)
        return changed

    @property
    def models(self) -> str:
        """The names of target and draft, joined by `` + ``."""
        return self.target.name + (f" + {self.draft.name}" if self.draft else "")

    @property
    def served(self) -> list[tuple[ModelGeometry, Precision | None]]:
        """The target, and the draft if there is one, with their precisions."""
        draft = [] if self.draft is None else [(self.draft, self.draft_precision)]
        return [(self.target, self.target_precision), *draft]

    @property
    def drafts_in_parallel(self) -> bool:
        """True if the draft proposes all tokens in one pass, as trained (PARD, P-EAGLE)."""
        return self.draft is not None and self.draft.drafts_in_parallel and self.method in METHODS_IN_PARALLEL

    @property
    def prediction_modules(self) -> int:
        """Modules for multi-token prediction that it drafts with one after the other; zero for other methods."""
        return (self.draft or self.target).mtp_layers if self.method == Method.MTP else 0

    @property
    def asynchronous(self) -> bool:
        """True if the engine prepares the next step while one runs."""
        methods: Mapping[str, bool] = sizing_facts(self.limits.engine_version)["async_scheduling"]
        return methods.get(self.method, True)

    @cached_property
    def era(self) -> VersionRules:
        """The rules of the engine's version, for the model runner that it chooses for this pair."""
        target, quantized = self.target, self.target_precision is not Precision.BF16
        traits = ModelTraits(target.architecture, target.has_experts, target.has_states, quantized)
        on_v1 = self.drafts_in_parallel or self.maps_vocabulary
        return find_version_rules(self.limits.engine_version, self.method, traits, drafts_on_v1=on_v1)

    @cached_property
    def loaded_draft(self) -> tuple[ModelGeometry, Precision] | None:
        """See the function of this name; most terms read it."""
        draft, target, version = self.draft, self.target, self.limits.engine_version
        if draft is None:
            if self.method == Method.MTP:
                return prediction_draft(target, self.num_speculative_tokens), self.target_precision
            own = _dspark_draft(target) if self.method == Method.DSPARK else None
            if self.method == Method.DSPARK and own is None and not target.is_made_up:
                raise PlanError("speculation.draft", None, _no_stages(target))
            return None if own is None else (own, self.target_precision)
        precision = self.draft_precision or draft.checkpoint_precision or Precision.BF16
        if self.method == Method.MTP and draft.head is None:
            if not draft.mtp_block:
                message = (
                    f"the checkpoint of {draft.name} has no layers for multi-token prediction that vLLM can draft"
                    " with: name one that has them, or remove it to draft with the target's own"
                )
                raise PlanError(_DRAFT_FIELD, draft.name, message)
            draft = prediction_draft(draft, self.num_speculative_tokens)
        if draft.head is not None and draft.head.refiner is not None and not sizing_facts(version)["refines_blocks"]:
            message = (
                f"vLLM {version} does not support heads with XPress: use 0.33 or later, or name a plain dflash head"
            )
            raise PlanError(_DRAFT_FIELD, draft.name, message)
        # The engine makes the rotary table of these heads as long as requests (config/speculative.py).
        stretched = sizing_facts(version)["positions_like_target"]
        least_positions = self.limits.max_model_len if self.method in stretched else 0
        return _fitted_draft(draft, target, self.num_speculative_tokens, least_positions), precision


_Changed = TypeVar("_Changed", EngineLimits, Pair)


def _changed(value: _Changed, **fields: object) -> _Changed:
    """Return a copy with these fields replaced; cached properties are kept."""
    copied = object.__new__(type(value))
    vars(copied).update(vars(value), **fields)
    return copied


def loaded_draft(pair: Pair) -> tuple[ModelGeometry, Precision] | None:
    """Return the draft that the engine loads and its precision, the target's own MTP layers included.

    Raise PlanError if the target has no MTP layers, the draft cannot propose that many tokens, or the version does not
    know it.
    """
    return pair.loaded_draft


def _no_stages(target: ModelGeometry) -> str:
    """Return why a target cannot draft with its own stages of DSpark, and what can."""
    # vLLM reads the key without a default (models/deepseek_v4/nvidia/dspark.py, DSparkDeepseekV4Model).
    may_hold = target.architecture.startswith(HOLDS_DSPARK)
    because = ", because its config.json has no dspark_target_layer_ids" if may_hold else ""
    builds = builds_with_own_draft(target.name, Method.DSPARK)
    instead = f"set target.model to {' or '.join(builds)}" if builds else "name a draft"
    method = Method.MTP if target.mtp_block else Method.NGRAM
    return f"{target.name} holds no stages of DSpark{because}: {instead}, or use method {method}"


_dspark_draft = lru_cache(maxsize=MEMO_SIZE)(dspark_head)


@lru_cache(maxsize=MEMO_SIZE)
def prediction_draft(target: ModelGeometry, num_speculative_tokens: int) -> ModelGeometry:
    """Return the draft that a target's own layers for multi-token prediction make.

    Raise PlanError without modules, or if the tokens are more than the modules and not a multiple of them (vLLM,
    config/speculative.py, __post_init__).
    """
    draft, modules = mtp_head(target), target.mtp_layers
    if num_speculative_tokens > modules and num_speculative_tokens % modules:
        message = (
            f"{target.name} has {modules} modules for multi-token prediction, which are run in turns; "
            f"write {num_speculative_tokens // modules * modules}, or another multiple of {modules}"
        )
        raise PlanError(_TOKENS_FIELD, num_speculative_tokens, message)
    return draft


@lru_cache(maxsize=MEMO_SIZE)
def _fitted_draft(draft: ModelGeometry, target: ModelGeometry, tokens: int, least_positions: int) -> ModelGeometry:
    """Return a draft as the engine builds it for a target; a separate model is unchanged.

    A head uses the target's embedding and output head instead of its own if they have the same shape (vLLM,
    v1/worker/gpu/spec_decode), and Medusa has one head per proposed token (configs/medusa.py). The rotary table of
    EAGLE has one row per position of the target's longest request.
    """
    parts = draft.head
    if parts is None:
        return draft
    if parts.most_tokens is not None and tokens > parts.most_tokens:
        most = parts.most_tokens
        message = f"{draft.name} was trained to propose at most {most} tokens per step; write {most} or less"
        raise PlanError(_TOKENS_FIELD, tokens, message)
    # vLLM reads its mixer of places as one of K + 1 (vllm/v1/worker/gpu/spec_decode/xpress/kernels.py).
    if parts.refiner is not None and tokens != (wanted := parts.refiner.places - 1):
        message = f"{draft.name} refines blocks of {wanted} proposed tokens, no fewer; write {wanted}"
        raise PlanError(_TOKENS_FIELD, tokens, message)
    rows = parts.output_rows
    if parts.medusa_heads:
        # A head a token, with the target's vocabulary (vLLM, config/speculative.py).
        one_output = parts.output_heads < parts.medusa_heads
        built = replace(
            parts,
            output_rows=rows if one_output else target.vocab_size,
            output_heads=1 if one_output else tokens,
            whole_elements=parts.whole_elements * tokens // parts.medusa_heads,
        )
        return replace(draft, head=built)

    def same_shape(rows: int) -> bool:
        same_rows = padded_vocabulary(rows) == padded_vocabulary(target.vocab_size)
        return same_rows and draft.hidden_size == target.hidden_size

    token_map_bytes = rows * TOKEN_ID_BYTES if rows and rows != target.vocab_size else 0
    fitted = replace(
        parts,
        shares_embedding=parts.shares_embedding and same_shape(draft.vocab_size),
        shares_output=parts.shares_output and (not rows or same_shape(rows)),
        whole_bytes=parts.whole_bytes - parts.token_map_bytes + token_map_bytes,
        token_map_bytes=token_map_bytes,
    )
    ropes = tuple(replace(rope, positions=max(rope.positions, least_positions)) for rope in draft.ropes)
    return replace(draft, head=fitted, ropes=ropes)


def vocabulary_mismatch(target: ModelGeometry, draft: ModelGeometry, unless: str = "") -> str | None:
    """Return why vLLM rejects a draft's vocabulary, with the exception ``unless``; None if it has the target's size.

    It compares only the padded sizes (config/speculative.py, verify_equal_vocab_size_if_draft_model).
    """
    if draft.vocab_size == target.vocab_size:
        return None
    wanted = f"its vocabulary has {draft.vocab_size} tokens and that of {target.name} {target.vocab_size}"
    one_maker = "/" in draft.name and draft.name.partition("/")[:2] == target.name.partition("/")[:2]
    if one_maker and abs(draft.vocab_size - target.vocab_size) <= _PADDED_AT_MOST:
        return f"{wanted}: one family, padded differently, but {unless}vLLM compares the sizes"
    return f"{wanted}, and {unless}vLLM wants the same"


def keeps_states_in_graphs(pair: Pair) -> bool:
    """Return whether each request that may run needs a block for its states, or a GPU's engine ends at start.

    vllm/config/compilation.py, resolve_cudagraph_mode_and_sizes, for whole graphs of a step; lengths of drafts that
    change leave pieces only on model runner V1 (config/vllm.py, _maybe_override_dynamic_sd_cudagraph_mode).
    """
    limits = pair.limits
    if not limits.captures_graphs or limits.graph_mode == "PIECEWISE" or not pair.target.has_states:
        return False
    return not (pair.other_draft_lengths and pair.era.runner is Runner.V1)


@lru_cache(maxsize=MEMO_SIZE)
def longest_sequence(model: ModelGeometry, version: str) -> int:
    """Return the longest sequence in tokens that a version of vLLM takes of a model."""
    if model.architecture.startswith(_STRETCHED_IN_FILE):
        return model.max_position_embeddings
    return stretched_length(model.max_position_embeddings, model.ropes, multiplies_yarn=multiplies_yarn(version))


def says_no_length(model: ModelGeometry) -> bool:
    """Return whether the file of a model whose cache grows with sequences does not limit their length.

    The engine takes 2,048 tokens or the number in its tokenizer's file (vLLM, config/model.py,
    _get_and_verify_max_len).
    """
    return model.max_position_embeddings == MAX_TOKENS and bool(model.attentions)


def extra_slots(pair: Pair) -> int:
    """Return the places in a step that drafting takes beyond K + 1 per request."""
    table = "parallel_draft_slots" if pair.drafts_in_parallel else "extra_draft_slots"
    slots: Mapping[str, int] = sizing_facts(pair.limits.engine_version)[table].get(pair.method, {})
    return slots.get("fixed", 0) + slots.get("each_token", 0) * pair.num_speculative_tokens


def effective_batch(pair: Pair) -> int:
    """Return the requests that can decode in one step: R_eff = min(R, T // (K + 1 + slots))."""
    limits = pair.limits
    per_request = pair.num_speculative_tokens + 1 + extra_slots(pair)
    return min(limits.max_num_seqs, limits.max_num_batched_tokens // per_request)


def profiled_requests(pair: Pair) -> int:
    """Return the requests of the profiling run: one for each that may run, with at least a token.

    If the draft proposes blocks, model runner V2 from 0.31 on limits them to the room for their blocks (vLLM,
    v1/worker/gpu/model_runner.py, _dummy_run, num_query_per_req).
    """
    limits = pair.limits
    requests = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    if pair.method not in METHODS_OF_BLOCKS or pair.era.runner is Runner.V1:
        return requests
    fits = sizing_facts(limits.engine_version)["profiles_whole_blocks"]
    return min(requests, limits.max_num_batched_tokens // block_places(pair)) if fits else requests


def block_places(pair: Pair) -> int:
    """Return the places of a block that DFlash or DSpark proposes: DFlash has one for the token that was verified."""
    return pair.num_speculative_tokens + (pair.method == Method.DFLASH)


def without_speculation(pair: Pair) -> Pair:
    """Return the pair without a draft."""
    kept = (pair.target, pair.target_precision)
    return Pair(*kept, None, None, Method.NONE, 0, limits=pair.limits, calibration=pair.calibration)
