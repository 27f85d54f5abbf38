"""Emulation of batches, acceptance and step times inside vLLM."""

import re
from random import Random
from statistics import mean, pstdev
from types import SimpleNamespace
from typing import Any

import pytest

from specdecode_operator.replay.emulated.batch import Batch, Constraint, Endings, Lateness, allows, pick
from specdecode_operator.replay.emulated.engine_model import (
    Acceptance,
    Difficulty,
    Drafting,
    Paces,
    StepShape,
    StepTime,
    acceptance_from_json,
    from_rates,
    step_time_from_json,
)
from tests.support.synthetic import rates


def new(req_id: str, prompt: int, computed: int = 0, *, prefill: int | None = None, **params: Any) -> SimpleNamespace:
    """A request that is scheduled for the first time; `prefill` as model runner V2 gets one that was preempted."""
    return SimpleNamespace(
        req_id=req_id,
        prompt_token_ids=[5] * prompt,
        prefill_token_ids=None if prefill is None else [5] * prefill,
        num_computed_tokens=computed,
        sampling_params=SimpleNamespace(
            **{"temperature": 0.0, "num_logprobs": None, "all_stop_token_ids": {1}} | params
        ),
    )


def step(
    counts: dict[str, int],
    *,
    new: tuple[Any, ...] = (),
    drafts: dict[str, list[int]] | None = None,
    width: int = 0,
    resumed: dict[str, tuple[int, int]] | None = None,
    finished: tuple[str, ...] = (),
) -> SimpleNamespace:
    """One step; `resumed` has a length and what is computed of it, by request."""
    again = resumed or {}
    cached = SimpleNamespace(
        req_ids=list(again),
        resumed_req_ids=set(again),
        all_token_ids={req_id: [5] * length for req_id, (length, _) in again.items()},
        num_computed_tokens=[computed for _, computed in again.values()],
    )
    return SimpleNamespace(
        finished_req_ids=set(finished),
        scheduled_new_reqs=list(new),
        scheduled_cached_reqs=cached,
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        scheduled_spec_decode_tokens=drafts or {},
        num_spec_tokens_to_schedule=width,
    )


# Emulation of batches, acceptance and step times inside vLLM.

RATES = (0.8, 0.6, 0.42, 0.3)
EASY = {"share": 0.25, "outcomes": [0, 0, 0, 1], "temperature": 0.0}
HARD = {"share": 0.75, "outcomes": [0, 1, 0, 0], "temperature": 0.0}
WARM = {"share": 1.0, "outcomes": [1, 0, 0, 0], "temperature": 1.0}
SECTION: dict[str, Any] = {
    "num_speculative_tokens": 2,
    "outcomes": [[0, 0], [2, 0], [2, 1], [2, 2]],
    "classes": [EASY, HARD],
}


def _drawn(model: Acceptance, difficulty: Difficulty, steps: int, width: int) -> list[tuple[int, int]]:
    drafting = Drafting(model, difficulty, Random(1))
    return [drafting.next(width) for _ in range(steps)]


@pytest.mark.parametrize("width", [1, 2, 4])
def test_drawn_acceptance_matches_rates_for_shorter_drafts(width: int) -> None:
    model = from_rates(RATES)
    found = _drawn(model, model.classes[0], 20_000, width)
    assert {drafted for drafted, _ in found} == {width}
    for position in range(1, width + 1):
        seen = sum(accepted >= position for _, accepted in found) / len(found)
        assert seen == pytest.approx(RATES[position - 1], abs=0.012)
    assert rates(model)[:width] == pytest.approx(RATES[:width])


def test_longer_draft_continues_with_last_conditional_rate() -> None:
    model = from_rates((0.8, 0.4))
    found = _drawn(model, model.classes[0], 20_000, 4)
    seen = [sum(accepted >= position for _, accepted in found) / len(found) for position in (1, 2, 3, 4)]
    assert seen == pytest.approx([0.8, 0.4, 0.2, 0.1], abs=0.012)


def test_request_keeps_its_acceptance_class() -> None:
    model = acceptance_from_json(SECTION)
    random = Random(2)
    classes = [model.draw_class(None, random) for _ in range(4000)]
    assert sum(each.outcomes[-1] == 1 for each in classes) / 4000 == pytest.approx(0.25, abs=0.02)
    for each, accepted in ((model.classes[0], 2), (model.classes[1], 0)):
        assert set(_drawn(model, each, 50, 2)) == {(2, accepted)}
    assert rates(model) == pytest.approx([0.25, 0.25])


@pytest.mark.parametrize(("temperature", "outcomes"), [(0.0, {0, 1}), (0.3, {0, 1}), (0.8, {2}), (None, {2})])
def test_acceptance_class_depends_on_temperature(temperature: float | None, outcomes: set[int]) -> None:
    model = acceptance_from_json(SECTION | {"classes": [EASY, HARD, WARM]})
    random = Random(3)
    assert {model.classes.index(model.draw_class(temperature, random)) for _ in range(100)} == outcomes


def test_outcomes_depend_on_previous_outcome_if_class_has_after() -> None:
    # After a full acceptance comes nothing, after nothing a full acceptance.
    rows = [[0, 0, 0, 1], [], [], [1, 0, 0, 0]]
    model = acceptance_from_json(SECTION | {"classes": [EASY | {"after": rows}]})
    assert _drawn(model, model.classes[0], 4, 2) == [(2, 2), (0, 0), (2, 2), (0, 0)]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"outcomes": [[2, 3]]}, " outcomes:"),
        ({"outcomes": [[3, 3]]}, " outcomes:"),
        ({"outcomes": []}, "$.outcomes"),
        ({"classes": []}, "classes"),
        ({"classes": [EASY | {"share": 0}]}, "share"),
        ({"classes": [EASY | {"share": -1}]}, "classes[0].share"),
        ({"classes": [EASY, HARD | {"outcomes": [1]}]}, "classes:"),
        ({"classes": [EASY | {"outcomes": [0, 0, 0, 0]}]}, "classes:"),
        ({"classes": [EASY | {"after": [[1, 0, 0, 0]]}]}, "classes:"),
        ({"classes": [EASY | {"ease": 1}]}, "ease"),
        ({"rates": [1]}, "rates"),
    ],
)
def test_invalid_acceptance_section_is_refused(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=f"acceptance:.*{re.escape(field)}"):
        acceptance_from_json(SECTION | change)


# What an emulated forward pass returns for a step.

ALL = from_rates((1.0, 1.0, 1.0, 1.0))
TWO = from_rates((1.0, 1.0, 0.0, 0.0))
PLACEHOLDERS = [-1] * 4


def _batch(acceptance: Acceptance | None = None) -> Batch:
    return Batch(acceptance, (300, 1000), Endings(), Random(0))


def test_chunked_prompt_gives_first_token_with_last_chunk() -> None:
    batch = _batch()
    first = step({"a": 60}, new=(new("a", 100),))
    assert batch.admit(first) == StepShape(1, 60, prefill_tokens=60, context_tokens=60, prefill_pairs=3600)
    assert batch.sample(first, {}).tokens == [[]]
    last = step({"a": 40})
    assert batch.admit(last) == StepShape(1, 40, prefill_tokens=40, context_tokens=100, prefill_pairs=4000)
    (tokens,) = batch.sample(last, {}).tokens
    assert len(tokens) == 1
    assert 300 <= tokens[0] <= 1000
    decode = step({"a": 1})
    assert batch.admit(decode) == StepShape(1, 1, context_tokens=101)
    assert len(batch.sample(decode, {}).tokens[0]) == 1


def test_cached_prompt_tokens_count_as_context_not_as_prefill() -> None:
    batch = _batch()
    shape = batch.admit(step({"a": 4}, new=(new("a", 100, computed=96),)))
    assert (shape.prefill_tokens, shape.context_tokens, shape.prefill_pairs) == (4, 100, 400)


@pytest.mark.parametrize("ahead", [False, True])
def test_accepted_tokens_equal_proposed_drafts(ahead: bool) -> None:
    batch = _batch(TWO)
    prompt = step({"a": 10}, new=(new("a", 10),), width=4)
    assert batch.admit(prompt).drafted == 4
    (drafts,) = batch.sample(prompt, {}).drafts
    assert len(drafts) == 4
    verify = step({"a": 5}, drafts={"a": PLACEHOLDERS if ahead else drafts}, width=4)
    assert batch.admit(verify) == StepShape(1, 5, context_tokens=15, drafted=4)
    (tokens,) = batch.sample(verify, {}).tokens
    assert tokens[:2] == drafts[:2]
    assert len(tokens) == 3
    # Two of five positions were wrong: the next step computes them again.
    assert batch.admit(step({"a": 5}, drafts={"a": PLACEHOLDERS}, width=4)).context_tokens == 18


def test_partial_prompt_drafts_nothing_and_fewer_drafts_can_be_scheduled() -> None:
    batch = _batch(ALL)
    part = step({"a": 5}, new=(new("a", 10),), width=4)
    assert batch.admit(part).drafted == 0
    assert batch.sample(part, {}).drafts == [[]]
    rest = step({"a": 5}, width=4)
    batch.admit(rest)
    (drafts,) = batch.sample(rest, {}).drafts
    verify = step({"a": 3}, drafts={"a": drafts[:2]}, width=1)
    batch.admit(verify)
    after = batch.sample(verify, {})
    assert after.tokens[0][:2] == drafts[:2]
    assert len(after.tokens[0]) == 3
    assert [len(each) for each in after.drafts] == [1]


@pytest.mark.parametrize("runner", [1, 2])
def test_preempted_request_is_prefilled_again_without_drafts(runner: int) -> None:
    batch = _batch(ALL)
    prompt = step({"a": 10}, new=(new("a", 10),), width=4)
    batch.admit(prompt)
    batch.sample(prompt, {})
    again = (
        step({"a": 11}, resumed={"a": (11, 0)}, width=4)
        if runner == 1
        else step({"a": 11}, new=(new("a", 10, prefill=11),), width=4)
    )
    assert batch.admit(again) == StepShape(1, 11, prefill_tokens=11, context_tokens=11, prefill_pairs=121, drafted=4)
    assert [len(each) for each in batch.sample(again, {}).tokens] == [1]


def test_id_of_finished_request_can_be_reused() -> None:
    batch = _batch(ALL)
    first = step({"a": 10}, new=(new("a", 10),))
    batch.admit(first)
    batch.sample(first, {})
    assert batch.admit(step({"a": 3}, new=(new("a", 3),), finished=("a",))).context_tokens == 3


def test_number_of_logprobs_is_the_largest_requested() -> None:
    batch = _batch()
    both = step({"a": 3, "b": 3}, new=(new("a", 3, num_logprobs=5), new("b", 3)))
    batch.admit(both)
    assert batch.sample(both, {}).logprobs == 5
    alone = step({"b": 1}, finished=("a",))
    batch.admit(alone)
    assert batch.sample(alone, {}).logprobs is None


def _only(token: int) -> list[int]:
    row = [0] * 32
    row[token // 32] = 1 << token % 32
    return row


def test_sampled_tokens_follow_grammar_until_its_end() -> None:
    batch = _batch(ALL)
    prompt = step({"a": 3}, new=(new("a", 3),), width=2)
    batch.admit(prompt)
    first = batch.sample(prompt, {"a": Constraint([_only(77)], 0)})
    assert first.tokens == [[77]]
    # One of two drafts is allowed: the token after it is the grammar's, too.
    verify = step({"a": 3}, drafts={"a": [40, -1]}, width=2)
    batch.admit(verify)
    rows = [_only(40), _only(41), [-1] * 32]
    assert batch.sample(verify, {"a": Constraint(rows, 1)}).tokens == [[40, 41]]
    # The end is allowed among others, and taken.
    last = step({"a": 1}, width=0)
    batch.admit(last)
    assert batch.sample(last, {"a": Constraint([[-1] * 32], 0)}).tokens == [[1]]


# Tokens that a grammar allows.


def _row(*tokens: int) -> list[int]:
    row = [0] * 4
    for token in tokens:
        word = row[token // 32] | 1 << token % 32
        row[token // 32] = word - 2**32 if word >= 2**31 else word  # as a signed number, as vLLM has it
    return row


@pytest.mark.parametrize("token", [0, 31, 32, 95, 127])
def test_the_only_allowed_token_is_picked(token: int) -> None:
    row = _row(token)
    assert allows(row, token)
    assert not allows(row, token ^ 1)
    assert pick(row, Endings(stop=(3,), closing=(4,)), Random(0)) == token


def test_pick_takes_stop_token_if_allowed_and_prefers_closing_tokens() -> None:
    row, random = _row(7, 8, 9), Random(2)
    assert {pick(row, Endings(stop=(200, 8)), random) for _ in range(20)} == {8}
    closed = [pick(row, Endings(closing=(9,)), random) for _ in range(200)]
    assert closed.count(9) > 100


def test_blank_token_is_picked_only_if_nothing_else_is_allowed() -> None:
    random = Random(3)
    endings = Endings(blank=frozenset({7, 100}))
    assert {pick(_row(7, 8, 50, 100), endings, random) for _ in range(100)} == {8, 50}
    assert pick(_row(7), endings, random) == 7


# Whether a machine was fast enough to be believed.


def test_step_is_late_beyond_ten_percent_and_one_millisecond() -> None:
    lateness = Lateness()
    for step_s, late_s in ((0.008, 0.0009), (0.008, 0.0011), (0.1, 0.009), (0.1, 0.011)):
        lateness.add(step_s, late_s)
    assert (lateness.steps, lateness.late_steps) == (4, 2)


def test_fast_machine_is_believable() -> None:
    lateness = Lateness()
    for index in range(1000):
        lateness.add(0.01, 0.005 if index % 25 == 0 else 0.0001)
    assert lateness.is_believable
    assert lateness.verdict() == "emulated: 1000 steps, 4.0 % of them late, 3.0 % longer in all"


def test_slow_machine_is_hopeless_and_reported() -> None:
    lateness = Lateness()
    for index in range(300):
        lateness.add(0.01, 0.005 if index % 10 == 0 else -0.001)
        assert lateness.is_hopeless == (index >= 199)
    assert "10.0 % of them late, 5.0 % longer in all" in lateness.verdict()
    assert "too slow for reliable results" in lateness.verdict()


# How long a step takes, by what is in it.

SECTION_STEP_TIME: dict[str, Any] = {
    "curve": [[1, 8.0], [101, 9.0], [1101, 29.0]],
    "request_us": 20,
    "prefill_token_us": 5,
    "context_ns": 100,
    "prefill_pair_ps": 10,
    "draft_ms": 0.5,
    "draft_request_us": 10,
}


@pytest.mark.parametrize(
    ("tokens", "ms"), [(1, 8.0), (0, 8.0), (51, 8.5), (101, 9.0), (601, 19.0), (1101, 29.0), (2101, 49.0)]
)
def test_scheduled_tokens_follow_the_curve(tokens: int, ms: float) -> None:
    model = StepTime(SECTION_STEP_TIME["curve"])
    assert model.ms(StepShape(1, tokens)) == pytest.approx(ms)


def test_step_time_terms_use_their_units() -> None:
    model = step_time_from_json(SECTION_STEP_TIME)
    step = StepShape(10, 101, prefill_tokens=40, context_tokens=10_000, prefill_pairs=1_000_000, drafted=4)
    assert model.ms(step) == pytest.approx(9.0 + 0.2 + 0.2 + 1.0 + 0.01 + 4 * 0.5 + 4 * 10 * 0.010)


def test_residuals_spread_step_times_around_the_model() -> None:
    model = step_time_from_json({"curve": [[1, 10.0]], "residuals": [0.5, 1.0, 1.5]})
    paces = Paces(model, Random(0))
    drawn = sorted(paces.draw_ms(StepShape(1, 1)) for _ in range(4000))
    assert 5.0 <= drawn[0] < 5.1
    assert 14.9 < drawn[-1] <= 15.0
    assert drawn[2000] == pytest.approx(10.0, abs=0.3)
    assert drawn[1000] == pytest.approx(7.5, abs=0.3)


def test_step_outside_fitted_range_is_reported_with_ratio() -> None:
    model = step_time_from_json(SECTION_STEP_TIME | {"ranges": {"requests": [4, 64], "drafted": [4, 4]}})
    assert model.outside(StepShape(64, 320, drafted=4)) == {}
    assert model.outside(StepShape(128, 640, drafted=2)) == {"requests": 2.0, "drafted": 0.5}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"curve": []}, "curve"),
        ({"curve": [[2, 8.0], [1, 9.0]]}, "curve"),
        ({"curve": [[1, -8.0]]}, "curve"),
        ({"curve": [[1, 8.0, 9.0]]}, "curve"),
        ({"request_us": float("nan")}, "request_us"),
        ({"persistence": 1}, "persistence"),
        ({"base_ms": 8}, "base_ms"),
        ({"ranges": {"requests": 64}}, "ranges"),
        ({"ranges": {"tokens": [1, 2]}}, "ranges"),
    ],
)
def test_invalid_step_time_section_is_refused(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=f"step_time: .*{field}"):
        step_time_from_json(SECTION_STEP_TIME | change)


def test_persistence_correlates_successive_step_times() -> None:
    step, spread = StepShape(1, 1), [0.5, 1.0, 1.5]
    means = {}
    for persistence in (0.0, 0.9):
        paces = Paces(StepTime([(1, 10.0)], residuals=spread, persistence=persistence), Random(3))
        hundreds = [mean(paces.draw_ms(step) for _ in range(100)) for _ in range(200)]
        means[persistence] = mean(hundreds), pstdev(hundreds)
    # Of an autoregressive series: by (1 + r) / (1 - r) more variance of long means, about.
    assert means[0.9][1] / means[0.0][1] == pytest.approx((1.9 / 0.1) ** 0.5, rel=0.2)
    assert means[0.9][0] == pytest.approx(10, rel=0.03)
