"""Sizing against what the newest vLLM answered (tests/engine/recorded_answers.py), to the byte and without it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.engine.oracle_batches import Batch, subjects
from tests.engine.oracle_cases import Case
from tests.engine.oracle_rules import refusal_differs
from tests.engine.recorded_answers import recorded
from tests.engine.test_sizing_oracle import cache_differs, draft_differs, tables_differ, weights_differ

ANSWERS = recorded()
SUBJECTS = subjects(quick=True)


def differences(batch: Batch, *compared: Callable[[Case, Any], Iterator[str]]) -> list[str]:
    """How sizing and the engine differ about the cases that the engine starts."""
    started = {case: answer for case in batch.cases if "error" not in (answer := ANSWERS[str(case)])}
    return [f"{case}: {each}" for case, answer in started.items() for how in compared for each in how(case, answer)]


def test_every_case_has_a_recorded_answer() -> None:
    assert {str(case) for batch in SUBJECTS.all for case in batch.cases} == ANSWERS.keys()


@pytest.mark.parametrize("batch", SUBJECTS.targets, ids=lambda batch: batch.name)
def test_model_sizes_match_recorded_vllm(batch: Batch) -> None:
    refused = {refusal_differs(case, "error" in ANSWERS[str(case)]) for case in batch.cases}
    assert refused == {""}
    assert differences(batch, weights_differ, tables_differ, cache_differs) == []


@pytest.mark.parametrize("batch", SUBJECTS.spread, ids=lambda batch: batch.name)
def test_expert_parallel_weights_match_recorded_vllm(batch: Batch) -> None:
    assert differences(batch, weights_differ) == []


@pytest.mark.parametrize("batch", SUBJECTS.drafted, ids=lambda batch: batch.name)
def test_draft_sizes_match_recorded_vllm(batch: Batch) -> None:
    assert {case.refused_by_sizing() for case in batch.cases} == {"error" in ANSWERS[str(case)] for case in batch.cases}
    assert differences(batch, draft_differs) == []
