"""What an engine's GPUs hold whichever product they are, how much of it the engine may use, and the cache's type.

A matrix, a search for what fits and a sweep ask for it again and again: it is worked out once.
"""

from dataclasses import fields
from functools import lru_cache
from operator import attrgetter
from typing import Final, NamedTuple

from specdecode_operator.sizing.base.eras import Era, sizing_facts
from specdecode_operator.sizing.base.errors import PlanError
from specdecode_operator.sizing.base.remembered import MOST_REMEMBERED, Remembered
from specdecode_operator.sizing.kv.layout import CachedLayers, layers_of_pair, stage_weights
from specdecode_operator.sizing.memory.activation import activation_bytes
from specdecode_operator.sizing.memory.buffers import METHODS_WITH_TOKEN_TABLE, charged_state_bytes
from specdecode_operator.sizing.memory.overhead import (
    graph_bytes,
    non_torch_bytes,
    runtime_overrun_bytes,
    uncharged_bytes,
)
from specdecode_operator.sizing.model.geometry import ModelGeometry
from specdecode_operator.sizing.model.layers import LatentAttention
from specdecode_operator.sizing.pair.pair import (
    TENSOR_FIELD,
    TENSOR_ONLY,
    EngineLimits,
    Pair,
    Parallelism,
    effective_batch,
    spread_problems,
)
from specdecode_operator.sizing.weights.divisibility import split_remedy, tensor_problems
from specdecode_operator.sizing.weights.stages import stages
from specdecode_operator.vocabulary import Precision


class Rank(NamedTuple):
    """What one GPU holds beside the KV cache: the sum of these."""

    target_bytes: int
    draft_bytes: int
    state_bytes: int
    activation_bytes: int
    graphs_bytes: int
    non_torch_bytes: int
    correction_bytes: int = 0  # What measurements change in the three before


class Footprint(NamedTuple):
    """What of an engine's memory its models, its settings and its split decide."""

    era: Era
    ranks: tuple[Rank, ...]  # A GPU of each pipeline stage
    cached: CachedLayers  # What its KV cache is for
    effective_batch: int
    overrun_bytes: int
    uncharged_bytes: int


def engine_footprint(pair: Pair, split: Parallelism) -> Footprint:
    """Return what a pair holds that is split so, remembered for pairs that differ in nothing that it depends on.

    Raises
    ------
    PlanError
        When the models cannot be split so.
    """
    limits = pair.limits
    reads_length = _reads_length(pair.target, pair.draft, pair.method, limits.engine_version)
    key = (split, limits.max_model_len if reads_length else None, _of_pair(pair), _of_limits(limits))
    return _FOOTPRINTS.get(key, lambda: _footprint(pair, split))


_FOOTPRINTS: Final = Remembered[Footprint]()

_CHANGE_NOTHING: Final = (
    *("calibration", "limits", "max_model_len", "memory_utilization_percent", "min_concurrency"),
    "kv_cache_element_bytes",
)
"""Fields of pairs and limits that no footprint depends on as they are."""

_of_pair: Final = attrgetter(*(each.name for each in fields(Pair) if each.name not in _CHANGE_NOTHING))
_of_limits: Final = attrgetter(*(each.name for each in fields(EngineLimits) if each.name not in _CHANGE_NOTHING))


@lru_cache(maxsize=MOST_REMEMBERED)
def _reads_length(target: ModelGeometry, draft: ModelGeometry | None, method: str, version: str) -> bool:
    """Whether anything beside the KV cache depends on the longest request.

    Images that fit into it, contexts of latent attention, tables of tokens, and rotary tables of heads.
    """
    attentions = [*target.attentions, *(() if draft is None else draft.attentions)]
    latent = any(isinstance(mixer, LatentAttention) for mixer in attentions)
    stretched = method in sizing_facts(version)["positions_like_target"]
    return latent or stretched or bool(target.tower.item_tokens) or method in METHODS_WITH_TOKEN_TABLE


def _footprint(pair: Pair, split: Parallelism) -> Footprint:
    refuse_bad_split(pair, split)
    return Footprint(
        era=pair.era,
        ranks=_ranks(pair, split),
        cached=layers_of_pair(pair, split),
        effective_batch=effective_batch(pair),
        overrun_bytes=runtime_overrun_bytes(pair, split.tensor),
        uncharged_bytes=uncharged_bytes(pair, split),
    )


def _ranks(pair: Pair, split: Parallelism) -> tuple[Rank, ...]:
    graphs, non_torch = graph_bytes(pair, split), non_torch_bytes(pair, split)
    loaded = zip(stages(pair.target, split.pipeline), stage_weights(pair, split), strict=True)
    return tuple(
        Rank(
            weights.target_bytes,
            weights.draft_bytes,
            charged_state_bytes(pair, split, stage),
            activation_bytes(pair, split, stage),
            graphs,
            non_torch,
        )
        for stage, weights in loaded
    )


def refuse_bad_split(pair: Pair, split: Parallelism | int) -> None:
    """Raise PlanError with the first problem of splitting the pair so."""
    if isinstance(split, int):
        split = TENSOR_ONLY.at(split)
    version = pair.limits.engine_version
    bad = _bad_split(pair.target, pair.target_precision, pair.draft, pair.draft_precision, version, split)
    if bad is not None:
        raise PlanError(bad.field, bad.value, bad.message)


@lru_cache(maxsize=MOST_REMEMBERED)
def _bad_split(  # noqa: PLR0913, PLR0917 (the key of the cache: all that it depends on)
    target: ModelGeometry,
    target_precision: Precision,
    draft: ModelGeometry | None,
    draft_precision: Precision | None,
    version: str,
    split: Parallelism,
) -> PlanError | None:
    tensor, data, expert = split.tensor, split.data, split.expert
    if tensor < 1:
        return PlanError(TENSOR_FIELD, tensor, "must be 1 or more")
    for problem in spread_problems(target, split, version):
        return problem
    for model, precision in ((target, target_precision), (draft, draft_precision)):
        problems = tensor_problems(model, tensor, precision, version, data=data, expert=expert) if model else ()
        if problems:
            models = (target, draft, target_precision, draft_precision, version)
            remedy = split_remedy(*models, data=data, expert=expert)
            return PlanError(TENSOR_FIELD, tensor, f"{problems[0].message}; {remedy}")
    return None
