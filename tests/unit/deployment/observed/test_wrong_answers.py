"""Answers to canary prompts: which readings count, and when the status is written."""

import pytest

from specdecode_operator.deployment.observed.wrong_answers import canaries_status, update_answers
from specdecode_operator.vllm.engine_metrics import CanaryReading, Unreachable
from tests.unit.deployment.test_canaries import facts

WRONG = CanaryReading(right=3, wrong=2, wrong_prompts=2)


def test_answers_of_a_pod_count_until_it_is_gone() -> None:
    before = {"a": WRONG, "b": WRONG}
    assert update_answers(before, {"a", "b"}, {"a": Unreachable("timed out")}) == before
    assert update_answers(before, {"b"}, {}) == {"b": WRONG}


@pytest.mark.parametrize(("right", "is_written"), [(99, True), (100, False), (199, False), (200, True)])
def test_status_is_written_after_a_restart_or_twice_as_many_answers(right: int, *, is_written: bool) -> None:
    before = canaries_status(facts(), {"a": CanaryReading(right=100)}, None)
    assert before is not None
    now = canaries_status(facts(), {"a": CanaryReading(right=right)}, before)
    assert now is not None
    assert now.right == (right if is_written else 100)
