"""Heads and models of the catalogue that could draft for a target."""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from specdecode_operator.enums import Knowledge
from specdecode_operator.sizing.catalogue import find_entry, known_models, published_heads, sized_geometry
from specdecode_operator.sizing.families.architectures import head_from_config
from specdecode_operator.sizing.families.draft_heads import method_of_head
from specdecode_operator.sizing.geometry import ModelGeometry
from specdecode_operator.sizing.result_cache import MEMO_SIZE
from specdecode_operator.sizing.weights import parameter_count


class DraftHead(NamedTuple):
    """A head that was trained for one target."""

    method: str  # eagle or eagle3
    geometry: ModelGeometry


@lru_cache(maxsize=MEMO_SIZE)
def known_heads(target_id: str) -> tuple[DraftHead, ...]:
    """Return the published heads for the target with exactly this hub id, the first of each size.

    Their shapes are those of their authors' training configurations.
    """
    by_size: dict[int, DraftHead] = {}
    for published in published_heads():
        entry = find_entry(published.head) if target_id in published.targets else None
        if entry is not None:
            geometry = head_from_config(published.head, entry.config, published.method)
            # A second head of the same size has the same budget.
            by_size.setdefault(parameter_count(geometry), DraftHead(published.method, geometry))
    return tuple(by_size.values())


def smaller_drafts(target: ModelGeometry, draft: ModelGeometry) -> tuple[ModelGeometry, ...]:
    """Return the catalogue's models that could draft in place of this one, largest first.

    They have fewer parameters than the draft, the target's architecture and vocabulary, come from the same
    organisation, and are instruction-tuned if the draft is. A quantized checkpoint is never proposed.
    """
    limit = parameter_count(draft)
    found = [
        geometry
        for geometry in _unquantized_models(target.vocab_size, draft.name)
        if geometry.architecture == target.architecture and geometry.head is None and parameter_count(geometry) < limit
    ]
    return tuple(sorted(found, key=lambda geometry: (-parameter_count(geometry), geometry.name)))


def matching_drafts(target: ModelGeometry, draft: ModelGeometry) -> tuple[ModelGeometry, ...]:
    """Return the catalogue's models with the target's vocabulary that could draft in place of a draft, smallest first.

    They come from the maker of one of the two, and have at most half of the target's parameters.
    """
    limit = parameter_count(target) // 2
    found = [
        geometry
        for geometry in _unquantized_models(target.vocab_size, target.name, draft.name)
        if method_of_head(geometry) is None and parameter_count(geometry) <= limit
    ]
    return tuple(sorted(found, key=lambda geometry: (parameter_count(geometry), geometry.name)))


def _unquantized_models(vocab_size: int, *names: str) -> Iterator[ModelGeometry]:
    """Yield exactly known models from the organisation of one of the named models, instruction-tuned if that is."""

    def kind(model_id: str) -> tuple[str, bool]:
        return model_id.partition("/")[0], model_id.lower().endswith(("-instruct", "-it", "-chat"))

    kinds = set(map(kind, names))
    for geometry in (sized_geometry(model_id) for model_id in known_models() if kind(model_id) in kinds):
        if geometry is None or geometry.knowledge is not Knowledge.EXACT:
            continue
        if geometry.vocab_size == vocab_size and geometry.checkpoint is None:
            yield geometry
