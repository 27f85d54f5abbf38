"""Lay out the KV cache of a pair: layers on stages and ranks, groups of block tables, and capacity.

All groups draw blocks of one size from one pool that target and draft share. Full attention alone is one group,
even with layers of different widths. Other mixes are cut into groups of about equal bytes, and each group takes
separate blocks for a request. Source: v1/core/kv_cache_utils.py. Weights are placed here too, because they share
the stages.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, NamedTuple

from specdecode_operator.enums import FLOAT32_BYTES, FP8_ELEMENT_BYTES, METHODS_WITH_HIDDEN_STATES, Knowledge, Precision
from specdecode_operator.sizing.arithmetic import ceil_div, named, round_up
from specdecode_operator.sizing.errors import PlanError, SizingError
from specdecode_operator.sizing.geometry import (
    BLOCK_TOKENS,
    DeltaNet,
    HeadParts,
    Indexer,
    IndexRows,
    LatentAttention,
    Layer,
    ModelGeometry,
    RopeTable,
    SelectiveScan,
    SelfAttention,
    SingleMixer,
    StateSpace,
    index_buffer_bytes,
)
from specdecode_operator.sizing.memory.kv_pages import (
    CacheKind,
    KvLayer,
    KvSettings,
    LayerRun,
    Page,
    equal_pages,
    falls_back_to_full,
    in_flight_tokens,
    is_uniform,
    keep_all_tokens,
    kv_rules,
    layer_pages,
    padded_pages,
    replayed_tokens,
    states_per_request,
)
from specdecode_operator.sizing.pair import PIPELINE_FIELD, Pair, Parallelism, loaded_draft
from specdecode_operator.sizing.rank_layers import Split, Stage, groups_per_rank, kv_heads_per_rank, stages, whole_model
from specdecode_operator.sizing.result_cache import MEMO_SIZE
from specdecode_operator.sizing.version_rules import Runner, sizing_facts
from specdecode_operator.sizing.weights import (
    Tables,
    allocation_bytes,
    copied_bytes,
    quantized_head_bytes,
    weight_parts,
)

_SIXTEEN_BIT_BYTES: Final = 2

_SCALED_TOGETHER: Final = 128
"""Numbers of an FP8 vector that share a scale (vLLM, DeepseekV32Indexer.quant_block_size)."""


@lru_cache(maxsize=MEMO_SIZE)
def cached_layers(
    target: ModelGeometry, draft: ModelGeometry | None, tensor: int, pipeline: int, element_bytes: int | None
) -> tuple[tuple[LayerRun, ...], ...]:
    """Return what each pipeline stage keeps; the draft sits on the last one.

    Without bytes of a number in the cache it is what the checkpoint asks for, or else the model's own type. The draft
    follows the target: vLLM gives both the same cache_dtype.
    """
    element_bytes = element_bytes or target.cache_element_bytes
    if any(_is_severed(stage) for stage in stages(target, pipeline)):
        message = f"cuts layers of {target.name} off from those whose keys and values they read; use 1"
        raise SizingError("parallelism.pipeline", pipeline, message)
    kept = [_runs(stage, target, tensor, element_bytes, of_draft=False) for stage in stages(target, pipeline)]
    if draft is not None and draft.layers:
        kept[-1] += _runs(stages(draft, 1)[0], draft, tensor, element_bytes, of_draft=True)
    return tuple(kept)


def _runs(
    stage: Stage, geometry: ModelGeometry, tensor: int, element_bytes: int | None, *, of_draft: bool
) -> tuple[LayerRun, ...]:
    width = element_bytes or geometry.dtype_bytes
    runs = []
    for layer, count in stage.distinct_layers:
        for mixer in _keeping(layer):
            kept = _kv_layer(mixer, tensor, width, geometry.dtype_bytes, of_draft=of_draft)
            kept = _as_assumed(kept, geometry)
            runs.append(LayerRun(kept, named(count, f"{kept.kind.value} layers", like=geometry.hidden_size)))
    return tuple(runs)


def _as_assumed(layer: KvLayer, geometry: ModelGeometry) -> KvLayer:
    """Return the cache of a layer, scaled to what the user says that those of all layers take on one GPU."""
    of_tokens, of_states = geometry.assumed_token_bytes, geometry.assumed_state_bytes
    if of_tokens is None and of_states is None:
        return layer
    by_shape = whole_cache(geometry)
    if layer.kind is CacheKind.STATE:
        return layer if of_states is None else _scaled_state(layer, of_states, by_shape.state_bytes)
    return layer if of_tokens is None else _scaled_tokens(layer, of_tokens, by_shape.token_bytes)


def _scaled_tokens(layer: KvLayer, given: int, by_shape: int) -> KvLayer:
    return replace(layer, token_bytes=max(ceil_div(layer.token_bytes * given, by_shape), 1))


def _scaled_state(layer: KvLayer, given: int, by_shape: int) -> KvLayer:
    return replace(
        layer,
        state_bytes=max(ceil_div(layer.state_bytes * given, by_shape), 1),
        state_bytes_per_speculated_token=ceil_div(layer.state_bytes_per_speculated_token * given, by_shape),
    )


class WholeCache(NamedTuple):
    """What all layers of a model keep on one GPU, by their shapes."""

    token_bytes: int
    state_bytes: int


@lru_cache(maxsize=MEMO_SIZE)
def whole_cache(geometry: ModelGeometry) -> WholeCache:
    """Return the bytes of a token and of a request's states, in the model's own type, whatever the user assumes."""
    width = geometry.dtype_bytes
    kept = [
        (_kv_layer(mixer, 1, width, width, of_draft=False), count)
        for layer, count in geometry.distinct_layers
        for mixer in _keeping(layer)
    ]
    tokens = sum(count * layer.token_bytes for layer, count in kept)
    return WholeCache(tokens, sum(count * layer.state_bytes for layer, count in kept))


def _is_severed(stage: Stage) -> bool:
    """Decide whether layers borrow keys and values of one that lies on another stage (vLLM refuses: attention.py)."""
    mixers = [mixer for layer, _ in stage.distinct_layers for mixer in layer.mixers if isinstance(mixer, SelfAttention)]
    lent = {mixer.window_tokens for mixer in mixers if not mixer.borrows_cache}
    return any(mixer.borrows_cache and mixer.window_tokens not in lent for mixer in mixers)


def _keeping(layer: Layer) -> tuple[SingleMixer | Indexer, ...]:
    """Return what of a layer keeps something of a sequence."""
    indexers = [mixer.indexer for mixer in layer.mixers if isinstance(mixer, LatentAttention) and mixer.indexer]
    own = (mixer for mixer in layer.mixers if not (isinstance(mixer, SelfAttention) and mixer.borrows_cache))
    return (*own, *indexers)


def _kv_layer(mixer: SingleMixer | Indexer, tensor: int, width: int, state_width: int, *, of_draft: bool) -> KvLayer:
    match mixer:
        case SelfAttention():
            token = kv_heads_per_rank(mixer.num_kv_heads, tensor) * (mixer.head_dim + mixer.value_dim) * width
            kind, reach = CacheKind.FULL, 0
            if mixer.window_tokens is not None:
                kind, reach = CacheKind.SLIDING, mixer.window_tokens
            elif mixer.chunk_tokens is not None:
                kind, reach = CacheKind.CHUNKED, mixer.chunk_tokens
            return KvLayer(kind, token, reach, head_width=mixer.head_dim, element_bytes=width, of_draft=of_draft)
        case LatentAttention():
            return _latent(mixer, width, of_draft=of_draft)
        case Indexer():
            return _index_keys(mixer, of_draft=of_draft)
        case DeltaNet():
            return _delta_net(mixer, tensor, state_width, of_draft=of_draft)
        case StateSpace():
            return _state_space(mixer, tensor, state_width, of_draft=of_draft)
        case SelectiveScan():
            return _selective_scan(mixer, tensor, state_width, of_draft=of_draft)


def _latent(mixer: LatentAttention, width: int, *, of_draft: bool) -> KvLayer:
    """Return the cache of latent attention: one vector for all heads, whole on every rank (MLAAttentionSpec).

    In FP8, sparse attention keeps its rotary part in 16 bits and a scale for
    each 128 of the rest (fp8_ds_mla, v1/kv_cache_interface.py): 656 bytes in
    the place of 576 with DeepSeek V3.2 and GLM-5. Kernels of Blackwell do not.
    """
    latent = mixer.kv_rank + mixer.rope_head_dim
    token = latent * width
    if mixer.sparse_tokens and mixer.packs_cache and width == FP8_ELEMENT_BYTES:
        token = mixer.kv_rank + _scale_bytes(mixer.kv_rank) + mixer.rope_head_dim * _SIXTEEN_BIT_BYTES
    return KvLayer(CacheKind.LATENT, token, head_width=latent, element_bytes=width, of_draft=of_draft)


def _index_keys(indexer: Indexer, *, of_draft: bool) -> KvLayer:
    """Return the cache of an indexer: one FP8 key a token with its scales, whatever the type of the other layers.

    models/deepseek_v32/attention.py, DeepseekV32Indexer: 132 bytes with a width of 128.
    """
    token = indexer.head_dim + _scale_bytes(indexer.head_dim)
    return KvLayer(CacheKind.LATENT, token, head_width=token, element_bytes=FP8_ELEMENT_BYTES, of_draft=of_draft)


def _scale_bytes(width: int) -> int:
    """Return the bytes of the float32 scales of a vector in FP8."""
    return width // _SCALED_TOGETHER * FLOAT32_BYTES


def _delta_net(mixer: DeltaNet, tensor: int, width: int, *, of_draft: bool) -> KvLayer:
    """Return the state of a linear layer (vLLM, mamba_utils.py, gated_delta_net_state_shape)."""
    convolution = mixer.conv_width // tensor * width
    state_width = mixer.state_element_bytes or width
    temporal = mixer.num_value_heads // tensor * mixer.value_head_dim * mixer.key_head_dim * state_width
    return KvLayer(
        CacheKind.STATE,
        state_bytes=convolution * (mixer.conv_kernel - 1) + temporal,
        state_bytes_per_speculated_token=convolution,
        delta_rule=True,
        of_draft=of_draft,
    )


def _state_space(mixer: StateSpace, tensor: int, width: int, *, of_draft: bool) -> KvLayer:
    """Return the state of a Mamba 2 layer (vLLM, mamba_utils.py, mamba2_state_shape and mamba2_state_dtype)."""
    groups = groups_per_rank(mixer.num_groups, tensor)
    convolution = (mixer.width // tensor + 2 * groups * mixer.state_size) * width
    temporal = mixer.width // tensor * mixer.state_size * (mixer.state_element_bytes or width)
    return KvLayer(
        CacheKind.STATE,
        state_bytes=convolution * (mixer.conv_kernel - 1) + temporal,
        state_bytes_per_speculated_token=convolution,
        exports_checkpoint=True,
        of_draft=of_draft,
    )


def _selective_scan(mixer: SelectiveScan, tensor: int, width: int, *, of_draft: bool) -> KvLayer:
    """Return the state of a Mamba 1 layer, which has no room for speculated tokens (mamba1_state_shape)."""
    columns = mixer.conv_kernel - 1 + mixer.state_size
    return KvLayer(CacheKind.STATE, state_bytes=mixer.width // tensor * columns * width, of_draft=of_draft)


Layers = tuple[LayerRun, ...]
"""The layers of one pipeline stage in the engine's order: the target's, then the draft's."""

_TOLERANCE: Final = 1.5
_TOLERANCE_BEFORE: Final = 1.25
"""Up to how many times the layers of the rarest kind still make one group (see rule groups_tolerate_half)."""


@dataclass(frozen=True)
class KvGroup:
    """Layers that share a table of blocks, on one rank."""

    kind: CacheKind  # How the engine manages them
    num_layers: int  # How many of them are on this rank
    block_size: int  # Tokens in one of its blocks; zero for states
    block_bytes: int  # Bytes that its layers on this rank keep in one block
    held_tokens: int | None  # Tokens of one request that it holds at most; None: all
    extra_blocks: int  # Blocks that a request takes beside those of its tokens
    of_draft: bool = False  # Whether any of its layers, on whichever stage, is the draft's

    def blocks_per_request(self, max_model_len: int) -> int:
        """Return the blocks of one request of this length (kv_cache_interface.py, max_memory_usage_bytes)."""
        if not self.block_size:
            return self.extra_blocks
        held = max_model_len if self.held_tokens is None else min(self.held_tokens, max_model_len)
        return ceil_div(held, self.block_size) + self.extra_blocks


@dataclass(frozen=True)
class KvGrouping:
    """The divided KV cache of one rank."""

    groups: tuple[KvGroup, ...]  # At least one
    bytes_per_block: int  # What one block of the pool takes: the bytes of the widest group

    @property
    def groups_of_draft(self) -> int:
        """Over how many groups the draft's layers are spread; 1 where there is no draft, or one group for all."""
        return max(1, sum(group.of_draft for group in self.groups))

    def blocks_per_request(self, max_model_len: int) -> int:
        """Return the blocks that one request of this length takes in all groups."""
        groups = self.groups
        if len(groups) == 1:
            return groups[0].blocks_per_request(max_model_len)
        return sum(group.blocks_per_request(max_model_len) for group in groups)


@lru_cache(maxsize=MEMO_SIZE)
def stage_groups(stages: tuple[Layers, ...], settings: KvSettings) -> tuple[KvGrouping, ...]:
    """Return how the engine divides the KV cache of each pipeline stage.

    Groups are formed over the layers of all stages (v1/core/kv_cache_utils.py, get_kv_cache_groups), then each stage
    keeps its part of every group (get_kv_cache_configs, _project_kv_cache_groups_to_worker). Raises SizingError for a
    mix with which the engine does not start.
    """
    runs = [(run, stage) for stage, layers in enumerate(stages) for run in layers if run.count]
    held = {stage for _, stage in runs}
    if len(held) < len(stages):
        first = next(stage for stage in range(len(stages)) if stage not in held)
        message = (
            f"no layer of stage {first + 1} keeps keys, values or states, and each stage needs one: use fewer stages"
        )
        raise PlanError(PIPELINE_FIELD, len(stages), message)
    pages = layer_pages([run.layer for run, _ in runs], settings)
    if not _manages_hybrids(runs, settings):
        pages = _one_type(pages)
    stage_of_layer = [stage for _, stage in runs]
    counts = [run.count for run, _ in runs]
    if is_uniform(pages):
        return _single_group(pages, counts, stage_of_layer, len(stages), settings)
    of_draft = [run.layer.of_draft for run, _ in runs]
    raised = equal_pages(pages, settings)
    kept = keep_all_tokens(pages) if raised is None and falls_back_to_full(pages, settings) else None
    if kept is not None:
        return _single_group(kept, counts, stage_of_layer, len(stages), settings)
    if raised is None and settings.layout_known:
        raise _unequal_blocks(pages, settings, drafts=any(of_draft))
    return _several_groups(raised or padded_pages(pages), counts, stage_of_layer, of_draft, len(stages), settings)


def _unequal_blocks(pages: Sequence[Page], settings: KvSettings, *, drafts: bool) -> SizingError:
    """Return the error for layers between which the engine cannot divide one pool."""
    kinds = ", ".join(sorted({page.layer.kind for page in pages}))
    field, remedy = ("speculation.draft", "another draft") if drafts else ("target.model", "another model")
    message = f"vLLM {settings.version} cannot give layers of these kinds ({kinds}) blocks of one size: use {remedy}"
    return SizingError(field, kinds, message)


def _manages_hybrids(runs: Sequence[tuple[LayerRun, int]], settings: KvSettings) -> bool:
    """Decide whether windows and chunks free what they forget (config/vllm.py, __post_init__)."""
    chunked = any(run.layer.kind is CacheKind.CHUNKED for run, _ in runs)
    allowed = settings.chunked_hybrid and not settings.draft_reads_hidden_states
    return settings.hybrid_manager and (allowed or not chunked)


def _one_type(pages: list[Page]) -> list[Page]:
    """Return the pages as managed without the hybrid manager (unify_hybrid_kv_cache_specs)."""
    kept = keep_all_tokens(pages)
    if kept is None:
        kinds = ", ".join(sorted({page.layer.kind for page in pages}))
        raise SizingError("layers", kinds, "these kinds of attention need the hybrid KV cache manager: leave it on")
    return kept


def _single_group(
    pages: Sequence[Page], counts: Sequence[int], stage_of: Sequence[int], num_stages: int, settings: KvSettings
) -> tuple[KvGrouping, ...]:
    """Return one group a stage, of layers that may differ in width."""
    num_layers = [0] * num_stages
    block_bytes = [0] * num_stages
    for page, count, stage in zip(pages, counts, stage_of, strict=True):
        num_layers[stage] += count
        block_bytes[stage] += count * page.page_bytes
    return tuple(
        _grouping((_group(pages[0], layers, size, settings),))
        for layers, size in zip(num_layers, block_bytes, strict=True)
    )


def _several_groups(  # noqa: PLR0913, PLR0917 (what is known of each run of layers)
    pages: Sequence[Page],
    counts: Sequence[int],
    stage_of: Sequence[int],
    of_draft: Sequence[bool],
    num_stages: int,
    settings: KvSettings,
) -> tuple[KvGrouping, ...]:
    """Return the groups of layers of several types and one page size (_get_kv_cache_groups_uniform_page_size).

    The rarest type gives the layers of a group; a type with more layers makes
    several groups, dealt out in turn so that each stage holds some of each.
    """
    types: dict[Page, list[tuple[int, bool]]] = {}
    for page, count, stage, drafts in zip(pages, counts, stage_of, of_draft, strict=True):
        types.setdefault(page, []).extend([(stage, drafts)] * count)
    layers_per_group = _layers_per_group([len(layers) for layers in types.values()], settings)
    dealt: list[tuple[Page, list[int], bool]] = []
    for page, layers in types.items():
        number = ceil_div(len(layers), layers_per_group)
        groups = (layers[index::number] for index in range(number))
        dealt.extend((page, [stage for stage, _ in group], any(drafts for _, drafts in group)) for group in groups)
    return tuple(
        _grouping(
            tuple(
                replace(
                    _group(page, stages.count(stage), stages.count(stage) * page.page_bytes, settings), of_draft=drafts
                )
                for page, stages, drafts in dealt
            )
        )
        for stage in range(num_stages)
    )


def _layers_per_group(layers_of_type: Sequence[int], settings: KvSettings) -> int:
    """Return the layers of a full group: those of the rarest type, or of the commonest where it is hardly commoner."""
    tolerance = _TOLERANCE if kv_rules(settings.version).groups_tolerate_half else _TOLERANCE_BEFORE
    fewest, most = min(layers_of_type), max(layers_of_type)
    return most if most < fewest * tolerance else fewest


def _group(page: Page, num_layers: int, block_bytes: int, settings: KvSettings) -> KvGroup:
    """Return the group of layers with this page, and what one request holds in it.

    A window may begin inside a block, so it takes one block more; what is in
    flight cannot be freed yet (kv_cache_interface.py, max_admission_blocks_per_request).
    """
    held: int | None = None
    extra = 0
    if page.layer.kind is CacheKind.SLIDING:
        held = page.layer.reach_tokens - 1 + replayed_tokens(settings) + in_flight_tokens(settings)
        extra = 1
    elif page.layer.kind is CacheKind.CHUNKED:
        held = page.layer.reach_tokens + in_flight_tokens(settings)
    elif page.layer.kind is CacheKind.STATE:
        held = 0
        extra = states_per_request(page.layer, settings)
    return KvGroup(page.layer.kind, num_layers, page.block_size, block_bytes, held, extra)


def _grouping(groups: tuple[KvGroup, ...]) -> KvGrouping:
    return KvGrouping(groups, max(group.block_bytes for group in groups))


NULL_BLOCKS: Final = 1
"""Blocks that the pool holds back for itself (block_pool.py, null_block): no request gets them."""


class KvCapacity(NamedTuple):
    """What fits into the space for the KV cache, in whole blocks."""

    num_blocks: int
    tokens: int
    max_concurrency: float
    """Requests of the full length that fit at once."""


def pool_blocks(stages: Sequence[KvGrouping], available_bytes: Sequence[int]) -> int:
    """Return the blocks of the pool: what the smallest of the ranks holds (get_kv_cache_configs)."""
    return min(max(0, size // stage.bytes_per_block) for stage, size in zip(stages, available_bytes, strict=True))


def pool_capacity(grouping: KvGrouping, num_blocks: int, max_model_len: int) -> KvCapacity:
    """Return what a pool of this many blocks holds.

    Floats as in vLLM (get_kv_cache_capacity), so that tokens equal the number that its log prints from 0.21 on. With
    pipeline stages any stage's grouping gives the same.
    """
    concurrency = num_blocks / request_blocks(grouping, max_model_len)
    return KvCapacity(num_blocks, int(concurrency * max_model_len), concurrency)


def request_blocks(grouping: KvGrouping, max_model_len: int) -> int:
    """Return the blocks that one request of this length takes."""
    if max_model_len < 1:
        raise SizingError("maxModelLen", max_model_len, "use a length of at least one token")
    return grouping.blocks_per_request(max_model_len)


def blocks_for(grouping: KvGrouping, max_model_len: int, requests: int) -> int:
    """Return the blocks that hold this many requests of the full length, with the block the pool holds back."""
    return requests * request_blocks(grouping, max_model_len) + NULL_BLOCKS


ALLOCATOR: Final = "allocator"
"""Part of the target's weights that only a GPU has."""


_INDEX_BUFFERS: Final = "tokens that indexers chose"


@dataclass(frozen=True)
class StageWeights:
    """Bytes that one rank loads."""

    target_bytes: int
    draft_bytes: int


def stage_weights(pair: Pair, split: Parallelism) -> tuple[StageWeights, ...]:
    """Return what a rank of each pipeline stage loads, and makes with it; the draft sits on the last stage."""
    draft, draft_precision = loaded_draft(pair) or (None, None)
    loaded = _stage_weights(pair.target, pair.target_precision, draft, draft_precision, split, _loading(pair))
    if pair.draft_head_quantization is not None:
        *before, last = loaded
        loaded = (*before, StageWeights(last.target_bytes, last.draft_bytes + _quantized_head_bytes(pair, split)))
    if not pair.target.has_sparse_attention:
        return loaded
    rows = _index_rows(pair)
    target_buffers = [index_buffer_bytes(stage.layers, rows) for stage in stages(pair.target, split.pipeline)]
    draft_buffers = [0] * (split.pipeline - 1) + [index_buffer_bytes(draft.layers, rows) if draft else 0]
    return tuple(
        StageWeights(weights.target_bytes + of_target, weights.draft_bytes + of_draft)
        for weights, of_target, of_draft in zip(loaded, target_buffers, draft_buffers, strict=True)
    )


def stage_parts(pair: Pair, split: Parallelism, number: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return what stage_weights counts for one pipeline stage, part by part: the target's and the draft's."""
    stage, rows = stages(pair.target, split.pipeline)[number], _index_rows(pair)
    of_target = target_parts(pair.target, pair.target_precision, split, stage, _loading(pair))
    of_target[_INDEX_BUFFERS] = index_buffer_bytes(stage.layers, rows)
    draft = loaded_draft(pair)
    if draft is None or not stage.is_last:
        return of_target, {}
    of_draft = draft_parts(pair.target, *draft, split, _loading(pair))
    of_draft["quantized output head"] = _quantized_head_bytes(pair, split)
    return of_target, {**of_draft, _INDEX_BUFFERS: index_buffer_bytes(draft[0].layers, rows)}


def _quantized_head_bytes(pair: Pair, split: Parallelism) -> int:
    kind = pair.draft_head_quantization
    return quantized_head_bytes(pair.target, kind, split.tensor) if kind is not None else 0


def _index_rows(pair: Pair) -> IndexRows:
    decoding_tokens = pair.limits.max_num_seqs * (pair.num_speculative_tokens + 1)
    return IndexRows(pair.limits.max_num_batched_tokens, decoding_tokens)


def parameter_weights(pair: Pair, tensor: int) -> StageWeights:
    """Return the weights of one rank without what a GPU's allocator adds."""
    loaded = stage_weights(pair, Parallelism(tensor))[0]
    added = allocation_bytes(pair.target, pair.target_precision, Split(tensor))
    return StageWeights(loaded.target_bytes - added, loaded.draft_bytes)


class Loading(NamedTuple):
    """What of loading a model depends on the engine's version."""

    encoder_everywhere: bool  # Whether each pipeline stage loads the encoder
    stretches_all_positions: bool  # Whether rotary tables of images are stretched that need not be


def loads_encoder_everywhere(pair: Pair) -> bool:
    """Decide whether each pipeline stage loads the encoder, or only that which runs it (interfaces.py, _mark_tower)."""
    return _loading(pair).encoder_everywhere


def _loading(pair: Pair) -> Loading:
    return _version_loading(pair.limits.engine_version, pair.era.runner)


@lru_cache(maxsize=MEMO_SIZE)
def _version_loading(version: str, runner: Runner) -> Loading:
    facts = sizing_facts(version)
    everywhere = runner is Runner.V1 or bool(facts["encoder_on_every_stage"])
    return Loading(everywhere, bool(facts["stretches_all_positions"]))


@lru_cache(maxsize=MEMO_SIZE)
def _stage_weights(  # noqa: PLR0913, PLR0917 (the key of the cache: all that it depends on)
    target: ModelGeometry,
    target_precision: Precision,
    draft: ModelGeometry | None,
    draft_precision: Precision | None,
    split: Parallelism,
    loading: Loading,
) -> tuple[StageWeights, ...]:
    sizes = _target_bytes(target, target_precision, split, loading)
    loaded = [StageWeights(size, 0) for size in sizes]
    if draft is not None and draft_precision is not None:
        own = _draft_bytes(target, draft, draft_precision, split, loading)
        loaded[-1] = StageWeights(loaded[-1].target_bytes, own)
    return tuple(loaded)


@lru_cache(maxsize=MEMO_SIZE)
def _target_bytes(target: ModelGeometry, precision: Precision, split: Parallelism, loading: Loading) -> tuple[int, ...]:
    """Return the target's part of each stage, whatever draft stands beside it."""
    parts = (target_parts(target, precision, split, stage, loading) for stage in stages(target, split.pipeline))
    return tuple(sum(each.values()) for each in parts)


@lru_cache(maxsize=MEMO_SIZE)
def _draft_bytes(
    target: ModelGeometry, draft: ModelGeometry, precision: Precision, split: Parallelism, loading: Loading
) -> int:
    return sum(draft_parts(target, draft, precision, split, loading).values())


def target_parts(
    target: ModelGeometry, precision: Precision, split: Parallelism, stage: Stage, loading: Loading
) -> dict[str, int]:
    """Return what a rank of one pipeline stage loads of the target, by what people call it."""
    added = allocation_bytes(target, precision, split.layer_split, stage=stage)
    return {
        **weight_parts(target, precision, split.layer_split, stage, encoder_everywhere=loading.encoder_everywhere),
        "rotary table": _table_bytes(target, target.ropes, loading),
        ALLOCATOR: named(added, "in whole segments of torch's allocator"),
    }


def draft_parts(
    target: ModelGeometry, draft: ModelGeometry, precision: Precision, split: Parallelism, loading: Loading
) -> dict[str, int]:
    """Return what a rank loads of the draft beside its target, by what people call it."""
    tables = Tables.OWN
    if draft.head is not None:
        tables = Tables.SHARED if _reaches_embedding(target, draft.head, split) else Tables.OWN_EMBEDDING
    return {
        **weight_parts(draft, precision, split.layer_split, whole_model(draft), tables),
        "second copies": copied_bytes(draft, split.tensor),
        # Equal tables are loaded once (vLLM, rotary_embedding/__init__.py, _ROPE_DICT).
        "rotary table": _table_bytes(draft, (rope for rope in draft.ropes if rope not in target.ropes), loading),
    }


def _table_bytes(model: ModelGeometry, ropes: Iterable[RopeTable], loading: Loading) -> int:
    return sum(rope.size_bytes(model.dtype_bytes, stretched=loading.stretches_all_positions) for rope in ropes)


def _reaches_embedding(target: ModelGeometry, head: HeadParts, split: Parallelism) -> bool:
    """Decide whether the target's embedding lies where the head does.

    Where it does not, the head brings its own, or the engine makes the target
    a second one (vLLM, models/utils.py, spec_decode_needs_target_embed): the
    same bytes.
    """
    on_last = target.tables_on_every_stage or target.embedding_on_every_stage or target.tie_word_embeddings
    return split.pipeline == 1 or (head.shares_on_last_stage and on_last)


class CachedLayers(NamedTuple):
    """Whose layers keep something, on how many GPUs, and what the engine was told: all but the type of the cache."""

    target: ModelGeometry
    draft: ModelGeometry | None
    tensor: int
    settings: KvSettings

    def layout(self, element_bytes: int | None) -> tuple[KvGrouping, ...]:
        """Return how each stage divides its KV cache of numbers with so many bytes."""
        return _layout(self.target, self.draft, self.tensor, element_bytes, self.settings)

    def bytes_per_token(self, element_bytes: int | None) -> int:
        """Return what kv_bytes_per_token says of numbers with so many bytes."""
        return _kv_bytes_per_token(self.target, self.draft, self.tensor, self.settings.pipeline, element_bytes)


def layers_of_pair(pair: Pair, split: Parallelism) -> CachedLayers:
    """Return the layers of target and draft that keep something."""
    draft = loaded_draft(pair)
    return CachedLayers(pair.target, draft[0] if draft else None, split.tensor, _kv_settings(pair, split.pipeline))


def cache_layout(pair: Pair, split: Parallelism) -> tuple[KvGrouping, ...]:
    """Return how each stage divides its KV cache among the layers of target and draft."""
    return layers_of_pair(pair, split).layout(pair.limits.kv_cache_element_bytes)


def cache_pages(pair: Pair, tensor: int) -> tuple[tuple[LayerRun, Page], ...]:
    """Return the layers that keep something on one rank without stages, and their pages as vLLM starts from them."""
    draft = loaded_draft(pair)
    (runs,) = cached_layers(pair.target, draft[0] if draft else None, tensor, 1, pair.limits.kv_cache_element_bytes)
    pages = layer_pages([run.layer for run in runs], _kv_settings(pair, 1))
    return tuple(zip(runs, pages, strict=True))


def _kv_settings(pair: Pair, pipeline: int) -> KvSettings:
    target, limits = pair.target, pair.limits
    models = (target, *(loaded_draft(pair) or ())[:1])
    return KvSettings(
        block_size=round_up(limits.block_size, BLOCK_TOKENS) if target.has_sparse_attention else limits.block_size,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        version=limits.engine_version,
        pipeline=pipeline,
        async_scheduling=pair.asynchronous,
        v2_runner=pair.era.runner is Runner.V2,
        # Without attention no prefixes are cached by default (vLLM, config/model.py, is_prefix_caching_supported).
        prefix_caching=limits.prefix_caching and bool(target.attentions),
        num_speculative_tokens=pair.num_speculative_tokens,
        draft_reads_hidden_states=pair.method in METHODS_WITH_HIDDEN_STATES,
        prediction_modules=pair.prediction_modules,
        layout_known=all(model.knowledge is Knowledge.EXACT for model in models),
    )


@lru_cache(maxsize=MEMO_SIZE)
def _layout(
    target: ModelGeometry, draft: ModelGeometry | None, tensor: int, element_bytes: int | None, settings: KvSettings
) -> tuple[KvGrouping, ...]:
    return stage_groups(cached_layers(target, draft, tensor, settings.pipeline, element_bytes), settings)


def kv_bytes_per_token(pair: Pair, split: Parallelism) -> int:
    """Return the KV cache of one more token in the layers of target and draft, on the stage that keeps the most.

    Layers with a window count until it is full; states do not count.
    """
    return layers_of_pair(pair, split).bytes_per_token(pair.limits.kv_cache_element_bytes)


@lru_cache(maxsize=MEMO_SIZE)
def _kv_bytes_per_token(
    target: ModelGeometry, draft: ModelGeometry | None, tensor: int, pipeline: int, element_bytes: int | None
) -> int:
    return max(_token_bytes(stage) for stage in cached_layers(target, draft, tensor, pipeline, element_bytes))


def _token_bytes(stage: tuple[LayerRun, ...]) -> int:
    return sum(run.count * run.layer.token_bytes for run in stage if run.layer.kind is not CacheKind.STATE)
