"""Lay out the KV cache of a pair: layers on stages and ranks, groups of block tables, and capacity.

All groups draw blocks of one size from one pool that target and draft share. Pure full attention is one group,
even with layers of different widths. Other mixes are cut into groups of about equal bytes, and each group takes
separate blocks for a request. Source: v1/core/kv_cache_utils.py. Weights are placed here too, because they share
the stages.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, NamedTuple

from specdecode_operator.enums import (
    FLOAT32_BYTES,
    FP8_ELEMENT_BYTES,
    METHODS_WITH_HIDDEN_STATES,
    SIXTEEN_BIT_BYTES,
    Knowledge,
    Precision,
)
from specdecode_operator.sizing.arithmetic import ceil_div, named, round_up
from specdecode_operator.sizing.errors import PlanError, SizingError
from specdecode_operator.sizing.geometry import (
    BLOCK_TOKENS,
    DeltaNet,
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

_SCALED_TOGETHER: Final = 128
"""Numbers of an FP8 vector that share a scale (vLLM, DeepseekV32Indexer.quant_block_size)."""


@lru_cache(maxsize=MEMO_SIZE)
def cached_layers(
    target: ModelGeometry, draft: ModelGeometry | None, tensor: int, pipeline: int, element_bytes: int | None
) -> tuple[tuple[LayerRun, ...], ...]:
    """Return the cached layers of each pipeline stage; the draft sits on the last one.

    Without ``element_bytes`` the cache has the type that the checkpoint requires, or else the model's own. The draft
    follows the target: vLLM gives both the same cache_dtype.
    """
    element_bytes = element_bytes or target.cache_element_bytes
    of_target = stages(target, pipeline)
    for stage in of_target:
        # Layers cannot borrow keys and values of one that lies on another stage (vLLM refuses: attention.py).
        mixers = [
            each for layer, _ in stage.distinct_layers for each in layer.mixers if isinstance(each, SelfAttention)
        ]
        lent = {mixer.window_tokens for mixer in mixers if not mixer.borrows_cache}
        if any(mixer.borrows_cache and mixer.window_tokens not in lent for mixer in mixers):
            message = f"cuts layers of {target.name} off from those whose keys and values they read; use 1"
            raise SizingError("parallelism.pipeline", pipeline, message)
    kept = [_runs(stage, target, tensor, element_bytes, of_draft=False) for stage in of_target]
    if draft is not None and draft.layers:
        kept[-1] += _runs(stages(draft, 1)[0], draft, tensor, element_bytes, of_draft=True)
    return tuple(kept)


def _runs(
    stage: Stage, geometry: ModelGeometry, tensor: int, element_bytes: int | None, *, of_draft: bool
) -> tuple[LayerRun, ...]:
    width = element_bytes or geometry.dtype_bytes
    tokens, states = geometry.assumed_token_bytes, geometry.assumed_state_bytes
    by_shape = whole_cache(geometry) if tokens is not None or states is not None else None
    runs = []
    for layer, count in stage.distinct_layers:
        for mixer in _keeping(layer):
            kept = replace(_kv_layer(mixer, tensor, width, geometry.dtype_bytes), of_draft=of_draft)
            # Scaled to what the user says that all layers take on one GPU.
            if by_shape is not None and kept.kind is CacheKind.STATE and states is not None:
                speculated = kept.state_bytes_per_speculated_token
                kept = replace(
                    kept,
                    state_bytes=max(ceil_div(kept.state_bytes * states, by_shape.state_bytes), 1),
                    state_bytes_per_speculated_token=ceil_div(speculated * states, by_shape.state_bytes),
                )
            elif by_shape is not None and kept.kind is not CacheKind.STATE and tokens is not None:
                kept = replace(kept, token_bytes=max(ceil_div(kept.token_bytes * tokens, by_shape.token_bytes), 1))
            runs.append(LayerRun(kept, named(count, f"{kept.kind.value} layers", like=geometry.hidden_size)))
    return tuple(runs)


class WholeCache(NamedTuple):
    """Bytes of all layers of a model on one GPU, by their shapes."""

    token_bytes: int
    state_bytes: int


@lru_cache(maxsize=MEMO_SIZE)
def whole_cache(geometry: ModelGeometry) -> WholeCache:
    """Return the bytes of a token and of a request's states in the model's own type, before any assumption."""
    tokens = states = 0
    for layer, count in geometry.distinct_layers:
        for mixer in _keeping(layer):
            kept = _kv_layer(mixer, 1, geometry.dtype_bytes, geometry.dtype_bytes)
            tokens += count * kept.token_bytes
            states += count * kept.state_bytes
    return WholeCache(tokens, states)


def _keeping(layer: Layer) -> tuple[SingleMixer | Indexer, ...]:
    """Return the parts of a layer that keep tokens or states of a sequence."""
    indexers = [mixer.indexer for mixer in layer.mixers if isinstance(mixer, LatentAttention) and mixer.indexer]
    own = (mixer for mixer in layer.mixers if not (isinstance(mixer, SelfAttention) and mixer.borrows_cache))
    return (*own, *indexers)


def _kv_layer(mixer: SingleMixer | Indexer, tensor: int, width: int, state_width: int) -> KvLayer:
    match mixer:
        case SelfAttention():
            token = kv_heads_per_rank(mixer.num_kv_heads, tensor) * (mixer.head_dim + mixer.value_dim) * width
            kind, reach = CacheKind.FULL, 0
            if mixer.window_tokens is not None:
                kind, reach = CacheKind.SLIDING, mixer.window_tokens
            elif mixer.chunk_tokens is not None:
                kind, reach = CacheKind.CHUNKED, mixer.chunk_tokens
            return KvLayer(kind, token, reach, head_width=mixer.head_dim, element_bytes=width)
        case LatentAttention():
            # One vector for all heads, whole on every rank (MLAAttentionSpec). In FP8, sparse attention keeps its
            # rotary part in 16 bits and a scale for each 128 of the rest (fp8_ds_mla, v1/kv_cache_interface.py): 656
            # bytes instead of 576 with DeepSeek V3.2 and GLM-5. Kernels of Blackwell do not.
            latent = mixer.kv_rank + mixer.rope_head_dim
            token = latent * width
            if mixer.sparse_tokens and mixer.packs_cache and width == FP8_ELEMENT_BYTES:
                token = mixer.kv_rank + _scale_bytes(mixer.kv_rank) + mixer.rope_head_dim * SIXTEEN_BIT_BYTES
            return KvLayer(CacheKind.LATENT, token, head_width=latent, element_bytes=width)
        case Indexer():
            # One FP8 key per token with its scales, whatever the type of the other layers: 132 bytes with a width of
            # 128 (models/deepseek_v32/attention.py, DeepseekV32Indexer).
            token = mixer.head_dim + _scale_bytes(mixer.head_dim)
            return KvLayer(CacheKind.LATENT, token, head_width=token, element_bytes=FP8_ELEMENT_BYTES)
        case DeltaNet():
            # vLLM, mamba_utils.py, gated_delta_net_state_shape.
            convolution = mixer.conv_width // tensor * state_width
            temporal = mixer.num_value_heads // tensor * mixer.value_head_dim * mixer.key_head_dim
            return KvLayer(
                CacheKind.STATE,
                state_bytes=convolution * (mixer.conv_kernel - 1)
                + temporal * (mixer.state_element_bytes or state_width),
                state_bytes_per_speculated_token=convolution,
                delta_rule=True,
            )
        case StateSpace():
            # Mamba 2 (vLLM, mamba_utils.py, mamba2_state_shape and mamba2_state_dtype).
            groups = groups_per_rank(mixer.num_groups, tensor)
            convolution = (mixer.width // tensor + 2 * groups * mixer.state_size) * state_width
            temporal = mixer.width // tensor * mixer.state_size * (mixer.state_element_bytes or state_width)
            return KvLayer(
                CacheKind.STATE,
                state_bytes=convolution * (mixer.conv_kernel - 1) + temporal,
                state_bytes_per_speculated_token=convolution,
                exports_checkpoint=True,
            )
        case SelectiveScan():
            # Mamba 1 has no room for speculated tokens (mamba1_state_shape).
            columns = mixer.conv_kernel - 1 + mixer.state_size
            return KvLayer(CacheKind.STATE, state_bytes=mixer.width // tensor * columns * state_width)


def _scale_bytes(width: int) -> int:
    """Return the bytes of the float32 scales of a vector in FP8."""
    return width // _SCALED_TOGETHER * FLOAT32_BYTES


Layers = tuple[LayerRun, ...]
"""The layers of one pipeline stage in the engine's order: the target's, then the draft's."""

_TOLERANCE: Final = 1.5
_TOLERANCE_BEFORE: Final = 1.25
"""Ratio to the rarest kind below which layers still make one group (see rule groups_tolerate_half)."""


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
        """Number of groups with layers of the draft; 1 without a draft, or if one group holds all."""
        return max(1, sum(group.of_draft for group in self.groups))

    def blocks_per_request(self, max_model_len: int) -> int:
        """Return the blocks that one request of this length takes in all groups."""
        return sum(group.blocks_per_request(max_model_len) for group in self.groups)


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
    pages, of_draft = layer_pages([run.layer for run, _ in runs], settings), [run.layer.of_draft for run, _ in runs]
    kinds = ", ".join(sorted({page.layer.kind for page in pages}))
    # Windows and chunks free what they forget unless the hybrid manager is off (config/vllm.py, __post_init__).
    chunked = any(page.layer.kind is CacheKind.CHUNKED for page in pages)
    allowed = settings.chunked_hybrid and not settings.draft_reads_hidden_states
    if not (settings.hybrid_manager and (allowed or not chunked)):
        kept = keep_all_tokens(pages)  # unify_hybrid_kv_cache_specs
        if kept is None:
            raise SizingError("layers", kinds, "these kinds of attention need the hybrid KV cache manager: leave it on")
        pages = kept
    if not is_uniform(pages):
        raised = equal_pages(pages, settings)
        kept = keep_all_tokens(pages) if raised is None and falls_back_to_full(pages, settings) else None
        if kept is None and raised is None and settings.layout_known:
            field, remedy = (
                ("speculation.draft", "another draft") if any(of_draft) else ("target.model", "another model")
            )
            message = f"cannot give layers of these kinds ({kinds}) blocks of one size: use {remedy}"
            raise SizingError(field, kinds, f"vLLM {settings.version} {message}")
        if kept is None:
            pages = raised or padded_pages(pages)
            placed = [(run.count, stage, drafts) for (run, stage), drafts in zip(runs, of_draft, strict=True)]
            return _several_groups(pages, placed, len(stages), settings)
        pages = kept
    # One group a stage, of layers that may differ in width.
    num_layers, block_bytes = [0] * len(stages), [0] * len(stages)
    for page, (run, stage) in zip(pages, runs, strict=True):
        num_layers[stage] += run.count
        block_bytes[stage] += run.count * page.page_bytes
    by_stage = zip(num_layers, block_bytes, strict=True)
    return tuple(KvGrouping((_group(pages[0], layers, size, settings),), size) for layers, size in by_stage)


def _several_groups(
    pages: Sequence[Page], placed: Sequence[tuple[int, int, bool]], num_stages: int, settings: KvSettings
) -> tuple[KvGrouping, ...]:
    """Return the groups of layers of several types and one page size (_get_kv_cache_groups_uniform_page_size).

    ``placed`` has the count, the stage and the mark of the draft of each run of layers. The rarest type gives the
    layers of a group, or the commonest if it is hardly commoner; a type with more layers makes several groups, dealt
    out in turn so that each stage holds some of each.
    """
    types: dict[Page, list[tuple[int, bool]]] = {}
    for page, (count, stage, drafts) in zip(pages, placed, strict=True):
        types.setdefault(page, []).extend([(stage, drafts)] * count)
    tolerance = _TOLERANCE if kv_rules(settings.version).groups_tolerate_half else _TOLERANCE_BEFORE
    fewest, most = min(map(len, types.values())), max(map(len, types.values()))
    layers_per_group = most if most < fewest * tolerance else fewest
    dealt: list[tuple[Page, list[int], bool]] = []
    for page, layers in types.items():
        number = ceil_div(len(layers), layers_per_group)
        groups = (layers[index::number] for index in range(number))
        dealt.extend((page, [stage for stage, _ in group], any(drafts for _, drafts in group)) for group in groups)
    result = []
    for stage in range(num_stages):
        held = [
            replace(_group(page, own.count(stage), own.count(stage) * page.page_bytes, settings), of_draft=drafts)
            for page, own, drafts in dealt
        ]
        result.append(KvGrouping(tuple(held), max(group.block_bytes for group in held)))
    return tuple(result)


def _group(page: Page, num_layers: int, block_bytes: int, settings: KvSettings) -> KvGroup:
    """Return the group of layers with this page.

    A window may begin inside a block, so it takes one block more; tokens in flight cannot be freed yet
    (kv_cache_interface.py, max_admission_blocks_per_request).
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


NULL_BLOCKS: Final = 1
"""Blocks that the pool reserves for itself (block_pool.py, null_block)."""


class KvCapacity(NamedTuple):
    """Capacity of the KV cache, in whole blocks."""

    num_blocks: int
    tokens: int
    max_concurrency: float
    """Requests of the full length that fit together."""


def pool_blocks(stages: Sequence[KvGrouping], available_bytes: Sequence[int]) -> int:
    """Return the blocks of the pool, which the smallest rank limits (get_kv_cache_configs)."""
    return min(max(0, size // stage.bytes_per_block) for stage, size in zip(stages, available_bytes, strict=True))


def pool_capacity(grouping: KvGrouping, num_blocks: int, max_model_len: int) -> KvCapacity:
    """Return the capacity of a pool of this many blocks; with pipeline stages, any stage's grouping gives the same."""
    return capacity_of(num_blocks, request_blocks(grouping, max_model_len), max_model_len)


def capacity_of(num_blocks: int, blocks_per_request: int, max_model_len: int) -> KvCapacity:
    """Return the capacity of a pool of this many blocks.

    Floats as in vLLM (get_kv_cache_capacity), so that tokens equal the number that its log prints from 0.21 on.
    """
    concurrency = num_blocks / blocks_per_request
    return KvCapacity(num_blocks, int(concurrency * max_model_len), concurrency)


def request_blocks(grouping: KvGrouping, max_model_len: int) -> int:
    """Return the blocks that one request of this length takes."""
    if max_model_len < 1:
        raise SizingError("maxModelLen", max_model_len, "use a length of at least one token")
    return grouping.blocks_per_request(max_model_len)


def blocks_for(grouping: KvGrouping, max_model_len: int, requests: int) -> int:
    """Return the blocks that hold this many requests of the full length, with the block that the pool reserves."""
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
    """Return the bytes that a rank of each pipeline stage loads, with its buffers; the draft sits on the last stage."""
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
    """Return the parts of stage_weights for one pipeline stage: the target's and the draft's."""
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
    """Return the weights of one rank without the overhead of a GPU's allocator."""
    loaded = stage_weights(pair, Parallelism(tensor))[0]
    added = allocation_bytes(pair.target, pair.target_precision, Split(tensor))
    return StageWeights(loaded.target_bytes - added, loaded.draft_bytes)


class Loading(NamedTuple):
    """Rules of loading a model that depend on the engine's version."""

    encoder_everywhere: bool  # Whether each pipeline stage loads the encoder
    stretches_all_positions: bool  # Whether rotary tables of images are stretched that need not be


def loads_encoder_everywhere(pair: Pair) -> bool:
    """Decide whether each pipeline stage loads the encoder, or only that which runs it (interfaces.py, _mark_tower)."""
    return _loading(pair).encoder_everywhere


def _loading(pair: Pair) -> Loading:
    facts = sizing_facts(pair.limits.engine_version)
    everywhere = pair.era.runner is Runner.V1 or bool(facts["encoder_on_every_stage"])
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
    """Return the bytes of the target on each stage, for any draft."""
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
    """Return the bytes of the target that a rank of one pipeline stage loads, by the name of the part."""
    added = allocation_bytes(target, precision, split.layer_split, stage=stage)
    return {
        **weight_parts(target, precision, split.layer_split, stage, encoder_everywhere=loading.encoder_everywhere),
        "rotary table": _table_bytes(target, target.ropes, loading),
        ALLOCATOR: named(added, "in whole segments of torch's allocator"),
    }


def draft_parts(
    target: ModelGeometry, draft: ModelGeometry, precision: Precision, split: Parallelism, loading: Loading
) -> dict[str, int]:
    """Return the bytes of the draft that a rank loads in addition to its target, by the name of the part."""
    tables = Tables.OWN
    if draft.head is not None:
        # If the target's embedding lies on another stage, the head brings its own, or the engine makes the target a
        # second one (vLLM, models/utils.py, spec_decode_needs_target_embed): the same bytes.
        on_last = target.tables_on_every_stage or target.embedding_on_every_stage or target.tie_word_embeddings
        reaches = split.pipeline == 1 or (draft.head.shares_on_last_stage and on_last)
        tables = Tables.SHARED if reaches else Tables.OWN_EMBEDDING
    return {
        **weight_parts(draft, precision, split.layer_split, whole_model(draft), tables),
        "second copies": copied_bytes(draft, split.tensor),
        # Equal tables are loaded once (vLLM, rotary_embedding/__init__.py, _ROPE_DICT).
        "rotary table": _table_bytes(draft, (rope for rope in draft.ropes if rope not in target.ropes), loading),
    }


def _table_bytes(model: ModelGeometry, ropes: Iterable[RopeTable], loading: Loading) -> int:
    return sum(rope.size_bytes(model.dtype_bytes, stretched=loading.stretches_all_positions) for rope in ropes)


class CachedLayers(NamedTuple):
    """Models, tensor parallelism and settings that decide the KV cache: all but its type."""

    target: ModelGeometry
    draft: ModelGeometry | None
    tensor: int
    settings: KvSettings

    def layout(self, element_bytes: int | None) -> tuple[KvGrouping, ...]:
        """Return the division of each stage's KV cache with elements of this size."""
        return _layout(self.target, self.draft, self.tensor, element_bytes, self.settings)

    def bytes_per_token(self, element_bytes: int | None) -> int:
        """Return the bytes of a token with elements of this size, as kv_bytes_per_token."""
        return _kv_bytes_per_token(self.target, self.draft, self.tensor, self.settings.pipeline, element_bytes)


def layers_of_pair(pair: Pair, split: Parallelism) -> CachedLayers:
    """Return the models, the split and the settings that decide a pair's KV cache."""
    draft = loaded_draft(pair)
    return CachedLayers(pair.target, draft[0] if draft else None, split.tensor, _kv_settings(pair, split.pipeline))


def cache_layout(pair: Pair, split: Parallelism) -> tuple[KvGrouping, ...]:
    """Return the division of each stage's KV cache among the layers of target and draft."""
    return layers_of_pair(pair, split).layout(pair.limits.kv_cache_element_bytes)


def cache_pages(pair: Pair, tensor: int) -> tuple[tuple[LayerRun, Page], ...]:
    """Return the cached layers on one rank without stages, and their pages as vLLM starts from them."""
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
    runs = cached_layers(target, draft, tensor, pipeline, element_bytes)
    return max(
        sum(run.count * run.layer.token_bytes for run in stage if run.layer.kind is not CacheKind.STATE)
        for stage in runs
    )
