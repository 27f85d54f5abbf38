"""How settings and pairs of them are searched for what makes a pair fit."""

import re
from collections.abc import Callable
from dataclasses import replace

from specdecode_operator.sizing.memory.budget import Pair
from specdecode_operator.sizing.pair import effective_batch
from specdecode_operator.sizing.plan import Change, Changes, GpuPool, Question, fewer_batched_tokens, plan_on_gpus
from specdecode_operator.sizing.quantization_matrix import PLACE_ONLY

EIGHT_H100 = GpuPool("NVIDIA-H100-80GB-HBM3", 8)

PairFactory = Callable[..., Pair]


def test_utilization_is_never_proposed_beyond_95_percent(make_pair: PairFactory) -> None:
    for present in (92, 95, 97):
        pair = make_pair("FP8", min_concurrency=18, memory_utilization_percent=present)
        plan = plan_on_gpus(pair, [EIGHT_H100], 2)
        text = " ".join(fix.change for fix in plan.fixes)
        proposed = {int(each) for each in re.findall(r"gpuMemoryUtilizationPercent: (\d+)", text)}
        assert proposed <= set(range(92, 96)) - {present}


def test_two_settings_are_only_named_where_they_end_better_than_each_alone(make_pair: PairFactory) -> None:
    enough = plan_on_gpus(make_pair("FP8", min_concurrency=16), [EIGHT_H100], 2)
    assert enough.fixes[0].change == "serving.gpuMemoryUtilizationPercent: 95"
    assert not [fix for fix in enough.fixes if fix.change.count("serving.gpuMemoryUtilizationPercent: 95,")]


def test_a_second_setting_is_named_beside_a_length_where_requests_get_notably_longer(make_pair: PairFactory) -> None:
    def beside_a_length(percent: int) -> bool:
        pair = make_pair("FP8", min_concurrency=40, memory_utilization_percent=percent)
        found = [fix.change for fix in plan_on_gpus(pair, [EIGHT_H100], 2).fixes]
        return any("maxModelLen" in change and "gpuMemoryUtilizationPercent" in change for change in found)

    assert beside_a_length(87)
    assert not beside_a_length(90), "requests would get a sixth longer"


def test_batched_tokens_stay_enough_for_a_whole_decoding_batch(make_pair: PairFactory) -> None:
    """256 requests of K = 5 take 1792 places of a step, 7 each: 4096 is the smallest step down, and enough."""
    plan = plan_on_gpus(make_pair("FP8", min_concurrency=17), [EIGHT_H100], 2)
    text = " ".join(fix.change for fix in plan.fixes)
    assert set(re.findall(r"maxNumBatchedTokens: (\d+)", text)) == {"4096"}


def test_no_step_is_proposed_in_which_fewer_requests_decode(make_pair: PairFactory) -> None:
    question = Question(make_pair("FP8"), (EIGHT_H100,), 2, PLACE_ONLY)
    steps = [each.pair for each in fewer_batched_tokens(question)]
    assert [pair.limits.max_num_batched_tokens for pair in steps] == [4096, 2048], "with 1024 fewer would decode"
    assert {effective_batch(pair) for pair in steps} == {effective_batch(question.pair)}


def test_a_cache_that_is_fp8_already_is_not_told_to_become_it(make_pair: PairFactory) -> None:
    by_spec = make_pair("FP8", min_concurrency=40, kv_cache_element_bytes=1)
    whole = make_pair("FP8", min_concurrency=40)
    by_checkpoint = replace(whole, target=replace(whole.target, cache_element_bytes=1))
    for pair in (by_spec, by_checkpoint):
        plan = plan_on_gpus(pair, [EIGHT_H100], 2)
        assert plan.fixes
        assert "kvCacheDtype" not in " ".join(fix.change for fix in plan.fixes)


def test_nothing_is_proposed_that_would_be_refused(make_pair: PairFactory) -> None:
    """The next step of the same kind takes its place, and what has to go along is said."""

    def admit(_: Pair, asked: Changes) -> Changes | None:
        utilization = {change.value for change in asked if change.field == "serving.gpuMemoryUtilizationPercent"}
        return None if 92 in utilization else (*asked, Change("more", None))

    pair = make_pair("FP8", memory_utilization_percent=50)
    plan = plan_on_gpus(pair, [EIGHT_H100], 2, admit=admit)
    freely = plan_on_gpus(pair, [EIGHT_H100], 2)
    assert freely.fixes[0].change == "serving.gpuMemoryUtilizationPercent: 92"
    assert plan.fixes[0].change == "serving.gpuMemoryUtilizationPercent: 93, no more"
    assert plan_on_gpus(pair, [EIGHT_H100], 2, admit=lambda *_: None).fixes == ()
