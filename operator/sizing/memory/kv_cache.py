"""Where weights and KV cache of a pair lie: by pipeline stage, on one rank of it."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from specdecode_operator.sizing.base.eras import Runner, sizing_facts
from specdecode_operator.sizing.base.formula import named
from specdecode_operator.sizing.base.remembered import MOST_REMEMBERED
from specdecode_operator.sizing.base.units import round_up
from specdecode_operator.sizing.kv.groups import KvGrouping, stage_groups
from specdecode_operator.sizing.kv.layers import CacheKind, LayerRun
from specdecode_operator.sizing.kv.model_cache import cached_layers
from specdecode_operator.sizing.kv.pages import Page, layer_pages
from specdecode_operator.sizing.kv.settings import KvSettings
from specdecode_operator.sizing.model.geometry import HeadParts, ModelGeometry
from specdecode_operator.sizing.model.rope import RopeTable
from specdecode_operator.sizing.model.sparse import BLOCK_TOKENS, IndexRows, index_buffer_bytes
from specdecode_operator.sizing.pair.pair import Pair, Parallelism, loaded_draft
from specdecode_operator.sizing.weights.rank_layers import Split
from specdecode_operator.sizing.weights.stages import Stage, stages, whole_model
from specdecode_operator.sizing.weights.weights import (
    Tables,
    allocation_bytes,
    copied_bytes,
    quantized_head_bytes,
    weight_parts,
)
from specdecode_operator.vocabulary import METHODS_WITH_HIDDEN_STATES, Knowledge, Precision

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


@lru_cache(maxsize=MOST_REMEMBERED)
def _version_loading(version: str, runner: Runner) -> Loading:
    facts = sizing_facts(version)
    everywhere = runner is Runner.V1 or bool(facts["encoder_on_every_stage"])
    return Loading(everywhere, bool(facts["stretches_all_positions"]))


@lru_cache(maxsize=MOST_REMEMBERED)
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


@lru_cache(maxsize=MOST_REMEMBERED)
def _target_bytes(target: ModelGeometry, precision: Precision, split: Parallelism, loading: Loading) -> tuple[int, ...]:
    """Return the target's part of each stage, whatever draft stands beside it."""
    parts = (target_parts(target, precision, split, stage, loading) for stage in stages(target, split.pipeline))
    return tuple(sum(each.values()) for each in parts)


@lru_cache(maxsize=MOST_REMEMBERED)
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


@lru_cache(maxsize=MOST_REMEMBERED)
def _layout(
    target: ModelGeometry, draft: ModelGeometry | None, tensor: int, element_bytes: int | None, settings: KvSettings
) -> tuple[KvGrouping, ...]:
    return stage_groups(cached_layers(target, draft, tensor, settings.pipeline, element_bytes), settings)


def kv_bytes_per_token(pair: Pair, split: Parallelism) -> int:
    """Return the KV cache of one more token in the layers of target and draft, on the stage that keeps the most.

    Layers with a window count until it is full; states do not count.
    """
    return layers_of_pair(pair, split).bytes_per_token(pair.limits.kv_cache_element_bytes)


@lru_cache(maxsize=MOST_REMEMBERED)
def _kv_bytes_per_token(
    target: ModelGeometry, draft: ModelGeometry | None, tensor: int, pipeline: int, element_bytes: int | None
) -> int:
    return max(_token_bytes(stage) for stage in cached_layers(target, draft, tensor, pipeline, element_bytes))


def _token_bytes(stage: tuple[LayerRun, ...]) -> int:
    return sum(run.count * run.layer.token_bytes for run in stage if run.layer.kind is not CacheKind.STATE)
