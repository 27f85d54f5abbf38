"""Models with states: each request that may run needs a block of the KV cache, or vLLM captures no whole graphs."""

from typing import Any

import pytest

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.deployment.engine_settings import engine_settings
from specdecode_operator.deployment.planning import assumed_nodes, make_plan
from specdecode_operator.deployment.spec_facts import Facts
from specdecode_operator.deployment.validation import valid_facts
from specdecode_operator.deployment.warnings import plan_notes
from specdecode_operator.sizing.memory.budget import Term, Verdict
from specdecode_operator.sizing.plan import Plan

H100 = "NVIDIA-H100-80GB-HBM3"
MTP = {"method": "mtp", "numSpeculativeTokens": 2}
WITH_STATES = "Qwen/Qwen3.6-35B-A3B"
"""Of its weights in 16 bits one H100 holds little more."""


def planned(model: str = WITH_STATES, speculation: dict[str, Any] | None = None, **serving: Any) -> tuple[Facts, Plan]:
    body = {
        "target": {"model": model},
        "parallelism": {"tensor": 1},
        "accelerator": {"products": [H100]},
        "serving": {"maxModelLen": 32768, **serving},
    }
    facts = valid_facts(SpecDecodeDeploymentSpec.model_validate(body | {"speculation": speculation or MTP}))
    plan = make_plan(facts, assumed_nodes(facts), None)
    assert isinstance(plan, Plan)
    return facts.at(*plan.chosen.served), plan


def test_the_default_gives_way_to_what_starts() -> None:
    facts, plan = planned()
    served = engine_settings(facts.spec, facts.pair, 1).max_num_seqs
    assert served < facts.spec.serving.max_num_seqs
    assert served <= plan.chosen.budget.num_blocks
    assert plan.verdict is not Verdict.DOES_NOT_FIT
    assert any(f"maxNumSeqs is {served} in place of the default 256" in note for note in plan_notes(facts))


def test_the_next_larger_number_would_leave_doubts() -> None:
    _, plan = planned()
    fewer = plan.chosen.budget.fewer_seqs or 0
    _, doubled = planned(maxNumSeqs=2 * fewer)
    assert doubled.chosen.budget.binding_term in {Term.SEQUENCES, Term.MARGIN}


def test_a_number_of_ones_own_is_kept_and_refused() -> None:
    _, plan = planned(maxNumSeqs=255)
    budget = plan.chosen.budget
    assert (plan.verdict, budget.binding_term) == (Verdict.DOES_NOT_FIT, Term.SEQUENCES)
    assert budget.fewer_seqs is None
    assert budget.num_blocks < 255
    assert f"maxNumSeqs 255 exceeds the {budget.num_blocks} blocks" in plan.explanation
    assert any(change.field == "serving.maxNumSeqs" for fix in plan.fixes for change in fix.changes)


@pytest.mark.parametrize(
    "serving", [{"enforceEager": True}, {"cudagraphMode": "NONE"}, {"cudagraphMode": "PIECEWISE"}], ids=str
)
def test_without_whole_graphs_requests_may_outnumber_blocks(serving: dict[str, Any]) -> None:
    facts, plan = planned(**serving)
    assert plan.chosen.budget.num_blocks < facts.pair.limits.max_num_seqs == 256
    assert plan.verdict is not Verdict.DOES_NOT_FIT
    assert not any("maxNumSeqs is" in note for note in plan_notes(facts))


def test_of_attention_alone_no_request_needs_a_block() -> None:
    _, plan = planned("Qwen/Qwen3-8B", {"method": "ngram", "numSpeculativeTokens": 2}, maxNumSeqs=8192)
    assert plan.chosen.budget.binding_term is not Term.SEQUENCES
    assert plan.chosen.budget.fewer_seqs is None


def test_a_schedule_keeps_the_number_that_its_ranges_reach() -> None:
    ranges = [{"from": 1, "to": 256, "numSpeculativeTokens": 1}]
    facts, plan = planned(speculation=MTP | {"numSpeculativeTokensByBatchSize": ranges}, maxModelLen=4096)
    assert facts.pair.limits.max_num_seqs == 256
    assert plan.chosen.budget.binding_term is Term.SEQUENCES
