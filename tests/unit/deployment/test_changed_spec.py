"""Which changes of a spec may be proposed: only those that the API server and the engine would take."""

from typing import Any

import pytest

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.deployment.planning import admitted
from specdecode_operator.deployment.validation import valid_facts
from specdecode_operator.sizing.plan import Change

SPEC: dict[str, Any] = {
    "target": {"model": "meta-llama/Llama-3.1-8B-Instruct"},
    "speculation": {"method": "ngram", "numSpeculativeTokens": 4},
}


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        (Change("serving.maxNumSeqs", 64), True),
        # Out of bounds, against a CEL rule, and against a rule of vLLM's.
        (Change("serving.maxNumSeqs", 0), False),
        (Change("serving.maxNumBatchedTokens", 128), False),
        (Change("serving.maxModelLen", 10_000_000), False),
    ],
)
def test_a_change_is_proposed_where_nobody_would_refuse_it(change: Change, *, taken: bool) -> None:
    facts = valid_facts(SpecDecodeDeploymentSpec.parse(SPEC))
    assert (admitted(facts, facts.pair, (change,)) == (change,)) is taken
