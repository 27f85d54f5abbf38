"""Days of load on replay engines in virtual time: what a policy does, and what it costs against an oracle."""

import pytest

from specdecode_operator.deployment.policy import Rules
from specdecode_operator.enums import PolicyMode, PolicyOutcome
from tests.support.policy_loads import SCRIPTS, Script, live, measured

MOST_REGRET = 0.03


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_day_brings_nearly_what_an_oracle_would_and_no_flaps(script: Script) -> None:
    day = live(script, Rules(PolicyMode.ENFORCE), measured(), 900.0)
    assert tuple(day.done) == script.expected
    assert day.flaps == 0
    assert day.regret <= MOST_REGRET


def test_a_policy_that_only_observes_does_nothing() -> None:
    spike = next(each for each in SCRIPTS if "spike of four" in each.name)
    day = live(spike, Rules(PolicyMode.OBSERVE), measured(), 900.0)
    assert (day.done, PolicyOutcome.OBSERVED in day.outcomes) == ([], True)
