"""The unit of sizing: a target, its draft, their parallelism and the engine's limits.

`fitted_draft` returns the draft as the engine builds it beside its target.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Final

from specdecode_operator.enums import METHODS_IN_PARALLEL, METHODS_OF_BLOCKS, SIXTEEN_BIT_BYTES, Method, Precision
from specdecode_operator.sizing.calibration import UNCALIBRATED, Calibration
from specdecode_operator.sizing.config_fields import MAX_TOKENS
from specdecode_operator.sizing.errors import PlanError
from specdecode_operator.sizing.families.draft_heads import mtp_head
from specdecode_operator.sizing.geometry import (
    TOKEN_ID_BYTES,
    HeadParts,
    LatentAttention,
    ModelGeometry,
    SelfAttention,
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

TOKENS_FIELD: Final = "speculation.numSpeculativeTokens"
"""Where users say how many tokens are proposed a step."""


_PADDED_AT_MOST: Final = 1024
"""Tokens by which vocabularies of one family differ where each was padded to another multiple."""


def vocabulary_mismatch(target: ModelGeometry, draft: ModelGeometry, unless: str = "") -> str | None:
    """Return why vLLM refuses a draft's vocabulary ``unless`` told otherwise; None where it has the target's size.

    It compares the sizes alone (config/speculative.py, verify_equal_vocab_size_if_draft_model), padding and all.
    """
    if draft.vocab_size == target.vocab_size:
        return None
    wanted = f"its vocabulary has {draft.vocab_size} tokens and that of {target.name} {target.vocab_size}"
    if abs(draft.vocab_size - target.vocab_size) <= _PADDED_AT_MOST and _of_one_maker(draft, target):
        return f"{wanted}: one family, padded differently, but {unless}vLLM compares the sizes"
    return f"{wanted}, and {unless}vLLM wants the same"


def _of_one_maker(draft: ModelGeometry, target: ModelGeometry) -> bool:
    makers = [model.name.partition("/")[0] for model in (draft, target) if "/" in model.name]
    return len(makers) == 2 and makers[0] == makers[1]  # noqa: PLR2004  both have one


@lru_cache(maxsize=MEMO_SIZE)
def prediction_draft(target: ModelGeometry, num_speculative_tokens: int) -> ModelGeometry:
    """Return the draft that a target's own layers for multi-token prediction make.

    Raises
    ------
    PlanError
        When it has none, or the tokens are above its modules and no multiple
        of them (vLLM, config/speculative.py, __post_init__).
    """
    draft, modules = mtp_head(target), target.mtp_layers
    if num_speculative_tokens > modules and num_speculative_tokens % modules:
        message = (
            f"{target.name} has {modules} modules for multi-token prediction, which are run in turns; "
            f"write {num_speculative_tokens // modules * modules}, or another multiple of {modules}"
        )
        raise PlanError(TOKENS_FIELD, num_speculative_tokens, message)
    return draft


@lru_cache(maxsize=MEMO_SIZE)
def fitted_draft(
    draft: ModelGeometry, target: ModelGeometry, num_speculative_tokens: int, least_positions: int = 0
) -> ModelGeometry:
    """Return a draft as the engine makes it for a target; a model of its own stays as it is.

    A head takes the target's embedding and output head in the place of its own where they have the same shape (vLLM,
    v1/worker/gpu/spec_decode), and Medusa has as many heads as tokens are proposed (configs/medusa.py). The rotary
    table of EAGLE has as many rows as the target's longest request has positions.

    Raises
    ------
    PlanError
        When the head cannot propose so many tokens.
    """
    parts = draft.head
    if parts is None:
        return draft
    _refuse_tokens(draft.name, parts, num_speculative_tokens)
    if parts.medusa_heads:
        return replace(draft, head=_built_heads(parts, target.vocab_size, num_speculative_tokens))
    rows = parts.output_rows
    token_map_bytes = rows * TOKEN_ID_BYTES if rows and rows != target.vocab_size else 0
    fitted = replace(
        parts,
        shares_embedding=parts.shares_embedding and _same_shape(draft, draft.vocab_size, target),
        shares_output=parts.shares_output and (not rows or _same_shape(draft, rows, target)),
        whole_bytes=parts.whole_bytes - parts.token_map_bytes + token_map_bytes,
        token_map_bytes=token_map_bytes,
    )
    ropes = tuple(replace(rope, positions=max(rope.positions, least_positions)) for rope in draft.ropes)
    return replace(draft, head=fitted, ropes=ropes)


def _refuse_tokens(name: str, parts: HeadParts, num_speculative_tokens: int) -> None:
    if parts.most_tokens is not None and num_speculative_tokens > parts.most_tokens:
        message = f"{name} was trained to propose at most {parts.most_tokens} a step; write {parts.most_tokens} or less"
        raise PlanError(TOKENS_FIELD, num_speculative_tokens, message)
    # vLLM reads its mixer of places as one of K + 1, whatever it has
    # (vllm/v1/worker/gpu/spec_decode/xpress/kernels.py).
    if parts.refiner is not None and num_speculative_tokens != parts.refiner.places - 1:
        wanted = parts.refiner.places - 1
        message = f"{name} refines blocks of {wanted} proposed tokens, no fewer; write {wanted}"
        raise PlanError(TOKENS_FIELD, num_speculative_tokens, message)


def _built_heads(parts: HeadParts, vocabulary: int, num_speculative_tokens: int) -> HeadParts:
    """Return Medusa with a head a token and the target's vocabulary (vLLM, config/speculative.py)."""
    one_output = parts.output_heads < parts.medusa_heads
    return replace(
        parts,
        output_rows=parts.output_rows if one_output else vocabulary,
        output_heads=1 if one_output else num_speculative_tokens,
        whole_elements=parts.whole_elements * num_speculative_tokens // parts.medusa_heads,
    )


def _same_shape(draft: ModelGeometry, rows: int, target: ModelGeometry) -> bool:
    same_rows = padded_vocabulary(rows) == padded_vocabulary(target.vocab_size)
    return same_rows and draft.hidden_size == target.hidden_size


TENSOR_FIELD: Final = "parallelism.tensor"
"""Where users say over how many GPUs to split."""

PIPELINE_FIELD: Final = "parallelism.pipeline"
"""Where users say in how many stages the layers lie."""

DRAFT_FIELD: Final = "speculation.draft.model"
"""Where users name the draft."""

NO_LENGTH: Final = "is missing, and nothing says how long the sequences of this model may be: set it, such as 8192"
"""Problem of a length that is left out, with a model of which `says_no_length` is true."""

NO_GRAPHS: Final = "NONE"
"""vLLM's word for running each step without a CUDA graph (config/compilation.py, CUDAGraphMode)."""

GRAPHS_IN_PIECES: Final = "PIECEWISE"
"""vLLM's word for graphs of all but attention."""


@dataclass(frozen=True)
class EngineLimits:
    """Settings of the engine that decide its memory, and where it has kernels."""

    max_model_len: int  # Longest sequence in tokens
    max_num_seqs: int  # Requests that may run at once
    max_num_batched_tokens: int  # Tokens scheduled in one step
    block_size: int  # Tokens in one KV cache block
    kv_cache_element_bytes: int | None  # Bytes of one KV cache element; None for the model's own type
    memory_utilization_percent: float  # Share of the GPU's memory that the engine may use
    enforce_eager: bool  # Whether the engine runs without CUDA graphs
    min_concurrency: int  # Requests of max_model_len that must fit at once
    engine_version: str = NEWEST_VERSION  # vLLM's version
    dtype_bytes: int = SIXTEEN_BIT_BYTES  # Bytes of a number that is not quantized, in target and draft
    prefix_caching: bool = True  # Whether prefixes are cached
    graph_mode: str | None = None  # Which steps are captured as CUDA graphs, in vLLM's words; None for the engine's own
    # Most tokens of a step that is captured as a CUDA graph; None for the engine's own
    max_graph_tokens: int | None = None
    attention_backend: str | None = None  # By vLLM's name; None for the engine's own choice
    has_nvlink: bool = True  # Whether NVLink may join its GPUs
    compiles_anew: bool = False  # Whether the start finds no compile cache, as the first one on a machine
    may_run_fewer: bool = False  # Whether max_num_seqs may be lowered to what a model with states starts with

    @property
    def captures_graphs(self) -> bool:
        """Whether any step runs as a CUDA graph."""
        return not self.enforce_eager and self.graph_mode != NO_GRAPHS

    @property
    def has_own_graphs(self) -> bool:
        """Whether the engine itself decides which CUDA graphs it captures."""
        return self.graph_mode is None and self.max_graph_tokens is None


@dataclass(frozen=True)
class Parallelism:
    """Over how many GPUs one replica is spread. Where the plan chooses the tensor parallelism, it is 1 until then."""

    tensor: int = 1  # GPUs that share each layer
    pipeline: int = 1  # Stages of layers
    data: int = 1  # Copies of all but the experts
    expert: bool = False  # Whether whole experts are spread over tensor x data GPUs

    @property
    def groups(self) -> int:
        """Groups of GPUs that share layers: a replica takes so many times its tensor parallelism."""
        return self.pipeline * self.data

    def at(self, tensor: int) -> "Parallelism":
        """Return it with another tensor parallelism."""
        return parallelism(tensor, self.pipeline, self.data, self.expert)

    @property
    def each_copy(self) -> str:
        """What is said behind a figure of the KV cache or of requests: they are those of one copy, as vLLM has them."""
        return " per copy" if self.data > 1 else ""

    @property
    def gpus(self) -> int:
        """GPUs of one replica."""
        return self.tensor * self.pipeline * self.data

    @property
    def layer_split(self) -> Split:
        """How each layer is divided over ranks."""
        return Split(self.tensor, self.tensor * self.data if self.expert else 1, self.data)

    @property
    def label(self) -> str:
        """What people call it: ``TP 2``, or ``TP 4, PP 2, DP 2, EP``."""
        parts = [f"TP {self.tensor}"]
        parts += [f"PP {self.pipeline}"] * (self.pipeline > 1) + [f"DP {self.data}"] * (self.data > 1)
        return ", ".join(parts + ["EP"] * self.expert)


TENSOR_ONLY: Final = Parallelism()
"""Neither stages, nor copies, nor spread experts."""


@lru_cache(maxsize=MEMO_SIZE)
def parallelism(tensor: int, pipeline: int = 1, data: int = 1, expert: bool = False) -> Parallelism:
    """Return always the same object for the same numbers, as caches like it."""
    return Parallelism(tensor, pipeline, data, expert)


_TIED_ON_ONE_STAGE: Final = frozenset({"Ernie4_5_MoeForCausalLM"})
"""Classes that tie an output head which only the last stage has (vLLM up to 0.33, ernie45_moe.py)."""


def spread_problems(target: ModelGeometry, spread: Parallelism, version: str) -> tuple[PlanError, ...]:
    """Return the errors of spreading a target so, whatever its tensor parallelism; empty where it can be."""
    found = []
    if spread.pipeline > target.num_layers:
        message = (
            f"{target.name} has {target.num_layers} layers, and each stage needs one: use {target.num_layers} or less"
        )
        found.append(PlanError(PIPELINE_FIELD, spread.pipeline, message))
    elif spread.pipeline > 1 and target.architecture.startswith(tuple(sizing_facts(version)["unstaged_targets"])):
        message = f"vLLM {version} ends at start with {target.name} on several stages: use 1, or vLLM 0.30 or newer"
        found.append(PlanError(PIPELINE_FIELD, spread.pipeline, message))
    elif spread.pipeline > 1 and target.architecture in _TIED_ON_ONE_STAGE and target.tie_word_embeddings:
        message = f"vLLM ends at start with {target.name} on several stages, because its embeddings are tied: use 1"
        found.append(PlanError(PIPELINE_FIELD, spread.pipeline, message))
    if spread.expert and not target.has_experts and not target.is_made_up:
        # vllm/config/model.py, _verify_with_expert_parallelism.
        message = f"{target.name} has no experts to spread: remove it"
        found.append(PlanError("parallelism.expert", spread.expert, message))
    return tuple(found)


@dataclass(frozen=True)
class Pair:
    """A target, how tokens are proposed for it, and the engine's limits."""

    # The served model and the precision of its linear layers
    target: ModelGeometry
    target_precision: Precision
    # The draft model or head, for methods with a checkpoint of their own
    draft: ModelGeometry | None
    draft_precision: Precision | None
    method: str  # How tokens are proposed, a Method
    num_speculative_tokens: int  # Tokens proposed a step; 0 for method none
    limits: EngineLimits  # Settings of the engine
    # What real engines showed of the estimates; empty where nothing was measured
    calibration: Calibration = UNCALIBRATED
    maps_vocabulary: bool = False  # Whether the draft may have another vocabulary, whose tokens the engine maps
    samples_drafts: bool = False  # Whether the draft picks its tokens by chance, so that its logits are kept
    # Other numbers of proposed tokens, 0 among them, that the engine goes over to by the number of requests
    other_draft_lengths: frozenset[int] = frozenset()
    # Whether each step verifies only as many proposed tokens as are worth it
    adaptive_verification: bool = False
    # Whether tokens pass that the target would have rejected, by its entropy
    checks_by_entropy: bool = False
    # To what the engine quantizes the draft's copy of the target's output head: fp8 or nvfp4; None where they share it
    draft_head_quantization: str | None = None
    # From how many tokens a refiner chooses, 0 for all; None for as many as its file says
    refined_candidates: int | None = None

    def __post_init__(self) -> None:
        """Let both models compute in the engine's type (config/speculative.py: the draft gets the target's)."""
        for role in ("target", "draft"):
            model = getattr(self, role)
            if model is not None:
                object.__setattr__(self, role, computed_in(model, self.limits.dtype_bytes))

    @property
    def models(self) -> str:
        """The target's name, and after `` + `` that of the draft."""
        return self.target.name + (f" + {self.draft.name}" if self.draft else "")

    @property
    def drafts_in_parallel(self) -> bool:
        """Whether the draft proposes all tokens in one pass, as it was trained to (PARD, P-EAGLE)."""
        return self.draft is not None and self.draft.drafts_in_parallel and self.method in METHODS_IN_PARALLEL

    @property
    def prediction_modules(self) -> int:
        """Modules for multi-token prediction that it drafts with one after the other; zero for other methods."""
        return (self.draft or self.target).mtp_layers if self.method == Method.MTP else 0

    @property
    def asynchronous(self) -> bool:
        """Whether the engine prepares the next step while one runs."""
        methods: Mapping[str, bool] = sizing_facts(self.limits.engine_version)["async_scheduling"]
        return methods.get(self.method, True)

    @cached_property
    def era(self) -> VersionRules:
        """The rules of the engine's version, for the model runner that it chooses for this pair."""
        version, precision = self.limits.engine_version, self.target_precision
        return _era(
            version, self.method, self.target, precision, drafts_on_v1=self.drafts_in_parallel or self.maps_vocabulary
        )

    @cached_property
    def loaded_draft(self) -> tuple[ModelGeometry, Precision] | None:
        """See the function of this name; asked for by most terms."""
        return _loaded_draft(self)


_HOLDS_DSPARK: Final = "DeepseekV4"
"""Targets whose checkpoints hold stages of DSpark, which are part of their weights (config/speculative.py)."""


def loaded_draft(pair: Pair) -> tuple[ModelGeometry, Precision] | None:
    """Return the draft that the engine loads and its precision, the target's own MTP layers included.

    Raises
    ------
    PlanError
        When the target has no MTP layers, the draft cannot propose so many tokens, or the version does not know it.
    """
    return pair.loaded_draft


def _loaded_draft(pair: Pair) -> tuple[ModelGeometry, Precision] | None:
    if pair.draft is None:
        if pair.method == Method.MTP:
            return prediction_draft(pair.target, pair.num_speculative_tokens), pair.target_precision
        holds_stages = pair.target.is_made_up or pair.target.architecture.startswith(_HOLDS_DSPARK)
        if pair.method == Method.DSPARK and not holds_stages:
            message = f"{pair.target.name} holds no stages of DSpark: name a draft, or use method ngram"
            raise PlanError("speculation.draft", None, message)
        return None
    draft = pair.draft
    if pair.method == Method.MTP and draft.head is None:
        if not draft.mtp_block:
            message = (
                f"the checkpoint of {draft.name} has no layers for multi-token prediction that vLLM can draft with: "
                "name one that has them, or remove it to draft with the target's own"
            )
            raise PlanError(DRAFT_FIELD, draft.name, message)
        draft = prediction_draft(draft, pair.num_speculative_tokens)
    _refuse_refiner(draft, pair.limits.engine_version)
    precision = pair.draft_precision or pair.draft.checkpoint_precision or Precision.BF16
    # Of these heads the engine makes the rotary table as long as requests (config/speculative.py).
    stretched = sizing_facts(pair.limits.engine_version)["positions_like_target"]
    least_positions = pair.limits.max_model_len if pair.method in stretched else 0
    return fitted_draft(draft, pair.target, pair.num_speculative_tokens, least_positions), precision


def _refuse_refiner(draft: ModelGeometry, version: str) -> None:
    if draft.head is not None and draft.head.refiner is not None and not sizing_facts(version)["refines_blocks"]:
        message = f"vLLM {version} knows no heads with XPress: use 0.33 or later, or name a dflash head without"
        raise PlanError(DRAFT_FIELD, draft.name, message)


@lru_cache(maxsize=MEMO_SIZE)
def _era(version: str, method: str, target: ModelGeometry, precision: Precision, *, drafts_on_v1: bool) -> VersionRules:
    quantized = precision is not Precision.BF16
    traits = ModelTraits(target.architecture, target.has_experts, _has_states(target), quantized)
    return find_version_rules(version, method, traits, drafts_on_v1=drafts_on_v1)


def _has_states(model: ModelGeometry) -> bool:
    """Whether any layer keeps a state of a fixed size (Mamba, linear attention)."""
    mixers = [mixer for layer, _ in model.distinct_layers for mixer in layer.mixers]
    return not all(isinstance(mixer, SelfAttention | LatentAttention) for mixer in mixers)


def keeps_states_in_graphs(pair: Pair) -> bool:
    """Whether each request that may run needs a block for its states, or a GPU's engine ends at start.

    vllm/config/compilation.py, resolve_cudagraph_mode_and_sizes, for whole graphs of a step; lengths of drafts that
    change leave pieces only on model runner V1 (config/vllm.py, _maybe_override_dynamic_sd_cudagraph_mode).
    """
    limits = pair.limits
    if not limits.captures_graphs or limits.graph_mode == GRAPHS_IN_PIECES or not _has_states(pair.target):
        return False
    return not (pair.other_draft_lengths and pair.era.runner is Runner.V1)


_STRETCHED_IN_FILE: Final = "Gemma3"
"""Its max_position_embeddings is multiplied already (vLLM, config/model.py, _get_and_verify_max_len)."""


@lru_cache(maxsize=MEMO_SIZE)
def longest_sequence(model: ModelGeometry, version: str) -> int:
    """Return the longest sequence in tokens that a version of vLLM takes of a model."""
    if model.architecture.startswith(_STRETCHED_IN_FILE):
        return model.max_position_embeddings
    return stretched_length(model.max_position_embeddings, model.ropes, multiplies_yarn=multiplies_yarn(version))


def says_no_length(model: ModelGeometry) -> bool:
    """Return whether nothing says how long the sequences of a model may be, whose cache grows with them.

    The engine takes 2,048 tokens or what its tokenizer's file says (vLLM, config/model.py, _get_and_verify_max_len).
    """
    return model.max_position_embeddings == MAX_TOKENS and bool(model.attentions)


def extra_slots(pair: Pair) -> int:
    """Return the places in a step that drafting takes beyond K + 1 a request."""
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

    On model runner V2 from 0.31 on no more than there is room for their blocks, where the draft proposes such (vLLM,
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
    """Return the pair whose target is served alone."""
    return replace(
        pair,
        draft=None,
        draft_precision=None,
        method=Method.NONE,
        num_speculative_tokens=0,
        maps_vocabulary=False,
        samples_drafts=False,
        other_draft_lengths=frozenset(),
        adaptive_verification=False,
        checks_by_entropy=False,
        draft_head_quantization=None,
        refined_candidates=None,
    )
