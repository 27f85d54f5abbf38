"""What an emulated forward pass returns for a step."""

from random import Random

import pytest

from specdecode_operator.replay.emulated.batch import Batch, Constraint, Endings
from specdecode_operator.replay.emulated.engine_model import Acceptance, StepShape, from_rates
from tests.support.scheduled_steps import new, step

ALL = from_rates((1.0, 1.0, 1.0, 1.0))
TWO = from_rates((1.0, 1.0, 0.0, 0.0))
PLACEHOLDERS = [-1] * 4


def _batch(acceptance: Acceptance | None = None) -> Batch:
    return Batch(acceptance, (300, 1000), Endings(), Random(0))


def test_a_prompt_in_chunks_gives_its_token_with_the_last_of_them() -> None:
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


def test_cached_tokens_of_a_prompt_are_attended_to_and_not_computed() -> None:
    batch = _batch()
    shape = batch.admit(step({"a": 4}, new=(new("a", 100, computed=96),)))
    assert (shape.prefill_tokens, shape.context_tokens, shape.prefill_pairs) == (4, 100, 400)


@pytest.mark.parametrize("ahead", [False, True])
def test_accepted_drafts_are_the_ones_that_were_proposed(ahead: bool) -> None:
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


def test_fewer_drafts_than_proposed_may_be_scheduled_and_a_part_of_a_prompt_drafts_nothing() -> None:
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
def test_a_preempted_request_is_computed_again_and_forgets_its_drafts(runner: int) -> None:
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


def test_a_finished_request_leaves_and_its_name_may_come_again() -> None:
    batch = _batch(ALL)
    first = step({"a": 10}, new=(new("a", 10),))
    batch.admit(first)
    batch.sample(first, {})
    assert batch.admit(step({"a": 3}, new=(new("a", 3),), finished=("a",))).context_tokens == 3


def test_logprobs_are_those_that_the_most_demanding_request_wants() -> None:
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


def test_a_grammar_is_followed_and_ends() -> None:
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
