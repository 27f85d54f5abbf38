"""What could be served in place of what was asked for: other checkpoints, smaller drafts, draft heads."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from specdecode_operator.sizing.base.errors import GeometryError
from specdecode_operator.sizing.base.remembered import MOST_REMEMBERED
from specdecode_operator.sizing.choice.precision_rules import NOTHING_NAMED, Available
from specdecode_operator.sizing.families.catalogue import find_entry, find_geometry, known_models, published_heads
from specdecode_operator.sizing.families.config import head_from_config
from specdecode_operator.sizing.families.heads import method_of_head
from specdecode_operator.sizing.model.geometry import ModelGeometry
from specdecode_operator.sizing.pair.pair import Pair
from specdecode_operator.sizing.weights.weights import parameter_count
from specdecode_operator.vocabulary import Knowledge


@dataclass(frozen=True)
class DraftHead:
    """A head that was trained for one target."""

    method: str  # eagle or eagle3
    geometry: ModelGeometry  # Its shape


@dataclass(frozen=True)
class Alternatives:
    """What is known to exist beside the models of a pair."""

    available: Available = NOTHING_NAMED  # Other checkpoints that the user named
    # Models that could draft in place of the pair's, largest first; empty for those of the catalogue
    smaller_drafts: tuple[ModelGeometry, ...] = ()
    heads: tuple[DraftHead, ...] = ()  # Heads made for the pair's target


NO_ALTERNATIVES: Final = Alternatives()
"""Nothing but what the catalogue holds."""


def alternatives_to(pair: Pair, available: Available) -> Alternatives:
    """Return what is known to exist beside the models of a pair: what the user named, and heads of the catalogue."""
    return Alternatives(available, heads=known_heads(pair.target.name))


@lru_cache(maxsize=MOST_REMEMBERED)
def known_heads(target_id: str) -> tuple[DraftHead, ...]:
    """Return the published heads that were made for the target with exactly this hub id, the first of each size.

    Their shapes are those that their makers' training configurations say.
    """
    by_size: dict[int, DraftHead] = {}
    for published in published_heads():
        entry = find_entry(published.head) if target_id in published.targets else None
        if entry is not None:
            geometry = head_from_config(published.head, entry.config, published.method)
            # To the budget a second head of the same size is the same answer.
            by_size.setdefault(parameter_count(geometry), DraftHead(published.method, geometry))
    return tuple(by_size.values())


def smaller_drafts(target: ModelGeometry, draft: ModelGeometry) -> tuple[ModelGeometry, ...]:
    """Return the catalogue's models that could draft in place of this one, largest first.

    They have fewer parameters than the draft, the target's architecture and
    vocabulary, come from the same organisation, and are instruction-tuned
    if the draft is. A quantized checkpoint is never proposed.
    """
    limit = parameter_count(draft)
    found = [
        geometry
        for model_id in known_models()
        if _is_alike(model_id, draft.name)
        if (geometry := _geometry_or_none(model_id)) is not None
        if geometry.architecture == target.architecture
        and geometry.vocab_size == target.vocab_size
        and geometry.checkpoint is None
        and geometry.head is None
        and parameter_count(geometry) < limit
    ]
    return tuple(sorted(found, key=lambda geometry: (-parameter_count(geometry), geometry.name)))


def matching_drafts(target: ModelGeometry, draft: ModelGeometry) -> tuple[ModelGeometry, ...]:
    """Return the catalogue's models with the target's vocabulary that could draft in place of a draft, smallest first.

    They come from the maker of one of the two, and have at most half of the target's parameters.
    """
    limit = parameter_count(target) // 2
    found = [
        geometry
        for model_id in known_models()
        if _is_alike(model_id, target.name) or _is_alike(model_id, draft.name)
        if (geometry := _geometry_or_none(model_id)) is not None
        if geometry.vocab_size == target.vocab_size
        and geometry.checkpoint is None
        and method_of_head(geometry) is None
        and parameter_count(geometry) <= limit
    ]
    return tuple(sorted(found, key=lambda geometry: (parameter_count(geometry), geometry.name)))


def _is_alike(model_id: str, draft_id: str) -> bool:
    organisation = draft_id.partition("/")[0]
    return model_id.partition("/")[0] == organisation and _is_tuned(model_id) == _is_tuned(draft_id)


def _is_tuned(model_id: str) -> bool:
    return model_id.lower().endswith(("-instruct", "-it", "-chat"))


def _geometry_or_none(model_id: str) -> ModelGeometry | None:
    """Return the geometry, or None if sizing does not know it exactly."""
    try:
        geometry = find_geometry(model_id)
    except GeometryError:
        return None
    return geometry if geometry is None or geometry.knowledge is Knowledge.EXACT else None
