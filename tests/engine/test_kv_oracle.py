"""The division of the KV cache equals what vLLM's own functions make of the same layers, for mixes drawn at random."""

from collections.abc import Iterator
from typing import Any

from specdecode_operator.sizing.errors import SizingError
from specdecode_operator.sizing.memory.kv_cache import pool_blocks, pool_capacity, stage_groups
from tests.engine.differences import assert_none, differing_terms
from tests.engine.kv_draws import CASES, case, described
from tests.support.kv_logs import engine_starts, largest_length


def ours(one: dict[str, Any]) -> dict[str, Any]:
    groupings = stage_groups(one["stages"], one["settings"])
    blocks = pool_blocks(groupings, one["available_bytes"])
    capacity = pool_capacity(groupings[0], blocks, one["max_model_len"])
    return {
        "num_blocks": capacity.num_blocks,
        "group_layers": [sorted(group.num_layers for group in grouping.groups) for grouping in groupings],
        "groups_of_draft": groupings[-1].groups_of_draft,
        "bytes_per_block": [grouping.bytes_per_block for grouping in groupings],
        "tokens": capacity.tokens,
        "max_concurrency": capacity.max_concurrency,
        "starts": engine_starts(groupings[0], one["settings"].version, blocks, one["max_model_len"]),
        "largest_length": largest_length(groupings[0], one["settings"].version, blocks, one["max_model_len"]),
    }


KvAnswers = tuple[str, list[dict[str, Any]]]
"""A version of vLLM, and what it made of all draws."""


def test_random_layer_mixes_cover_the_intended_cases(kv_answers: KvAnswers) -> None:
    _, answers = kv_answers
    refused = [answer for answer in answers if "error" in answer]
    divided = [answer for answer in answers if "error" not in answer]
    assert 0 < len(refused) < CASES / 4
    assert sum(len(answer["group_layers"][0]) > 1 for answer in divided) > CASES / 4
    assert 0 < sum(answer["groups_of_draft"] > 1 for answer in divided) < CASES / 2
    assert 0 < sum(not answer["starts"] for answer in divided) < CASES / 2


def test_every_kv_cache_division_equals_vllm(kv_answers: KvAnswers) -> None:
    version, answers = kv_answers
    assert_none(difference for seed, answer in enumerate(answers) for difference in differences(seed, answer, version))


def differences(seed: int, theirs: dict[str, Any], version: str) -> Iterator[str]:
    """Yield how the division of one case differs from the engine's."""
    one = case(seed, version)
    try:
        found = ours(one)
    except SizingError as refusal:
        found = {"error": str(refusal)}
    if not ("error" in found and "error" in theirs):
        terms = "; ".join(differing_terms(found, theirs))
        if terms:
            yield f"seed {seed}: {terms}; {described(one)}"
