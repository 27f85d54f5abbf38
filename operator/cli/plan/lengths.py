"""How many tokens the KV cache of a candidate holds, and how many requests, by the length that requests may have."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from specdecode_operator.cli.plan.answers import Candidate
from specdecode_operator.deployment.spec.facts import Facts
from specdecode_operator.sizing.base.devices import find_device
from specdecode_operator.sizing.base.errors import SizingError
from specdecode_operator.sizing.memory.budget import estimate

_SHORTEST: Final = 1024
_OCTAVES: Final = 24


@dataclass(frozen=True)
class Held:
    """What a KV cache holds at one length."""

    max_model_len: int
    tokens: int
    requests: float  # of that length, at once


def held_by_length(facts: Facts, candidate: Candidate) -> list[Held]:
    """Return what the candidate would hold at lengths up to what the target was made for; nothing of a CPU."""
    device = find_device(candidate.product, facts.spec.accelerator.memory_gib_per_gpu)
    if facts.on_cpu or device is None:
        return []
    pair = facts.at(candidate.target_precision, candidate.draft_precision, candidate.budget.fewer_seqs).pair
    found = []
    for length in _lengths(pair.limits.max_model_len, pair.target.max_position_embeddings):
        try:
            budget = estimate(replace(pair, limits=replace(pair.limits, max_model_len=length)), device, candidate.split)
        except SizingError:
            continue
        if budget.kv_cache_tokens > 0:
            found.append(Held(length, budget.kv_cache_tokens, budget.max_concurrency))
    return found


def _lengths(own: int, longest: int) -> Iterator[int]:
    """Yield round lengths with the one that is asked for among them, shortest first."""
    octaves = (_SHORTEST << octave for octave in range(_OCTAVES))
    yield from sorted({own, *(length for length in octaves if length <= max(own, longest))})
