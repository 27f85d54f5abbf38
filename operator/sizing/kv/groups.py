"""How the engine divides its KV cache: groups of layers that share tables of blocks.

All groups draw blocks of one size from one pool. Full attention alone is one
group, whatever the width of its layers; other mixes are cut into groups of
about equal bytes, and each group takes its own blocks for the same request.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from specdecode_operator.sizing.base.errors import PlanError, SizingError
from specdecode_operator.sizing.base.remembered import MOST_REMEMBERED
from specdecode_operator.sizing.base.units import ceil_div
from specdecode_operator.sizing.kv.layers import CacheKind, LayerRun
from specdecode_operator.sizing.kv.pages import (
    Page,
    equal_pages,
    falls_back_to_full,
    is_uniform,
    keep_all_tokens,
    layer_pages,
    padded_pages,
)
from specdecode_operator.sizing.kv.settings import (
    KvSettings,
    in_flight_tokens,
    kv_rules,
    replayed_tokens,
    states_per_request,
)
from specdecode_operator.sizing.pair.pair import PIPELINE_FIELD

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


@lru_cache(maxsize=MOST_REMEMBERED)
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
