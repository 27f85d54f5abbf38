"""From which acceptance on a draft pays for its share of the KV cache: counted in bytes that are read."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from specdecode_operator.deployment.advice import BreakEven, break_even, pays_from
from specdecode_operator.sizing.devices import find_device
from specdecode_operator.sizing.geometry import Experts
from specdecode_operator.sizing.memory.budget import Budget, estimate
from specdecode_operator.sizing.pair import Pair, without_speculation

PairFactory = Callable[..., Pair]


def _budgets(pair: Pair) -> tuple[Budget, Budget]:
    device = find_device("NVIDIA-H100-80GB-HBM3")
    assert device is not None
    return estimate(pair, device, 2), estimate(without_speculation(pair), device, 2)


@pytest.mark.parametrize("k", [3, 5, 12])
def test_at_break_even_a_byte_that_is_read_gives_as_many_tokens_as_without_a_draft(
    make_pair: PairFactory, k: int
) -> None:
    pair = replace(make_pair("FP8"), num_speculative_tokens=k)
    budget, alone = _budgets(pair)
    needed = break_even(pair, budget, alone)
    assert needed is not None
    assert needed.full_cache is not None
    target, draft = alone.target_weights_bytes, budget.draft_weights_bytes
    of_draft = budget.kv_bytes_per_token - alone.kv_bytes_per_token
    # A request is one token long here: a full cache holds as many.
    tokens, without = budget.kv_cache_tokens, alone.kv_cache_tokens
    read = target + tokens * alone.kv_bytes_per_token + k * (draft + tokens * of_draft)
    read_without = target + without * alone.kv_bytes_per_token
    given = tokens * (1 + needed.full_cache * k)
    assert given / read == pytest.approx(without / read_without)
    assert needed.few_requests is not None
    assert needed.few_requests == pytest.approx(draft / target, rel=1e-3)
    assert needed.full_cache > needed.few_requests


def test_a_draft_as_large_as_its_target_never_pays(make_pair: PairFactory) -> None:
    pair = make_pair("INT4", "BF16")
    budget, alone = _budgets(pair)
    heavy = replace(budget, draft_weights_bytes=2 * alone.target_weights_bytes)
    needed = break_even(pair, heavy, alone)
    assert needed is not None
    assert (needed.few_requests, needed.full_cache) == (None, None)


def test_a_draft_of_one_pass_reads_its_weights_once(make_pair: PairFactory) -> None:
    pair = make_pair("FP8")
    assert pair.draft is not None
    budget, alone = _budgets(pair)
    in_parallel = replace(pair, draft=replace(pair.draft, drafts_in_parallel=True))
    for at_once in (in_parallel, replace(pair, method="dflash")):
        needed = break_even(at_once, budget, alone)
        assert needed is not None
        share = budget.draft_weights_bytes / alone.target_weights_bytes
        assert needed.few_requests == pytest.approx(share / pair.num_speculative_tokens, rel=1e-3)


def test_where_nothing_is_left_nothing_is_said(make_pair: PairFactory) -> None:
    pair = make_pair("FP8")
    budget, alone = _budgets(pair)
    assert break_even(pair, replace(budget, kv_cache_tokens=0), alone) is None
    assert break_even(replace(pair, num_speculative_tokens=0), budget, alone) is None
    assert break_even(pair, budget, replace(alone, target_weights_bytes=0)) is None


def test_of_a_mixture_of_experts_nothing_is_said_of_few_requests(make_pair: PairFactory) -> None:
    """A step of few tokens reads a part of the experts, and one that verifies reads more of them."""
    pair = make_pair("FP8")
    budget, alone = _budgets(pair)
    layer = pair.target.layers[0]
    experts = replace(layer, feed_forward=Experts(num_experts=64, top_k=8, intermediate_size=1024))
    mixture = replace(pair, target=replace(pair.target, layers=(experts, *pair.target.layers[1:])))
    dense, needed = break_even(pair, budget, alone), break_even(mixture, budget, alone)
    assert dense is not None
    assert needed is not None
    assert (needed.few_requests, needed.full_cache) == (None, dense.full_cache)
    text = pays_from(needed)
    assert "few requests" not in text
    assert "weights, those of all experts, and KV cache" in text


def test_where_a_full_cache_never_pays_few_requests_are_told_still() -> None:
    assert "(49 % with few requests)" in pays_from(BreakEven(few_requests=0.49, full_cache=None))


def test_a_target_of_a_few_bytes_has_a_break_even_too(make_pair: PairFactory) -> None:
    pair = make_pair("FP8")
    budget, alone = _budgets(pair)
    assert break_even(pair, budget, replace(alone, target_weights_bytes=1)) is not None
