"""What engines did lately, and what SpeculationActive says of it: counters since a start tell of a whole life."""

from dataclasses import replace
from typing import Any

import pytest

from specdecode_operator.api.deployment_status import SpecDecodeDeploymentStatus
from specdecode_operator.deployment.observed.observation import Observation
from specdecode_operator.stats.engine_window import NOTHING_RECENT, Recent, Work, update_recent
from specdecode_operator.vllm.engine_metrics import EngineReading, SpeculationReading, Unreachable
from tests.support.decisions import decide
from tests.support.objects import Body, parent, tiny_cpu
from tests.unit.deployment.test_deployment_status import SERVING, reading


def engine(steps: int, drafts: int, acceptance: float = 0.5) -> EngineReading:
    tokens = 3 * drafts
    seen = SpeculationReading(drafts, tokens, round(tokens * acceptance), (drafts // 2, 0, 0))
    return reading(speculation=seen, decode_steps=steps, generation_tokens=steps + 1)


def after(*rounds: dict[str, EngineReading | Unreachable]) -> Recent:
    recent = NOTHING_RECENT
    for readings in rounds:
        recent = update_recent(recent, readings)
    return recent


def timed(steps: int, seconds: float, tokens: int) -> EngineReading:
    return replace(engine(steps, steps), generation_tokens=tokens + 8, first_tokens=8, decode_seconds=seconds)


def test_a_window_tells_its_load_and_what_its_steps_brought() -> None:
    recent = update_recent(NOTHING_RECENT, {"a": timed(600, 9.0, 1500)}, 100.0)
    assert recent.running is None, "the first window began with the engine, whenever that was"
    both = {"a": timed(1600, 29.0, 4000), "b": timed(1000, 20.0, 2500)}
    recent = update_recent(recent, both, 110.0)
    assert recent.last is not None
    assert (recent.last.tokens, recent.last.seconds, recent.running) == (5000, 40.0, 2.0)


def test_an_engine_that_misses_a_question_does_not_come_back_with_its_whole_life() -> None:
    both = {"a": engine(1000, 1000), "b": engine(90_000, 90_000)}
    recent = after(both, {"a": engine(2000, 2000), "b": Unreachable("slow")}, {"a": engine(2100, 2100)})
    recent = update_recent(recent, {"a": engine(2600, 2600), "b": engine(90_500, 90_500)})
    assert recent.last is not None
    assert recent.last.steps == 600 + 500


def told(spec: Body, *rounds: dict[str, EngineReading]) -> SpecDecodeDeploymentStatus:
    return decide(parent(spec), Observation(SERVING, [], rounds[-1], recent=after(*rounds)))[1]


def active(spec: Body, *rounds: dict[str, EngineReading]) -> tuple[str, str]:
    (found,) = (each for each in told(spec, *rounds).conditions if each.type == "SpeculationActive")
    return found.status, found.reason


DRAFTED = {"a": engine(1000, 1000)}


def test_a_drafter_that_stopped_is_told_after_a_window_of_steps_and_not_before() -> None:
    assert active(tiny_cpu(), DRAFTED) == ("True", "Drafting")
    assert active(tiny_cpu(), DRAFTED, {"a": engine(1511, 1000)}) == ("True", "Drafting")
    assert active(tiny_cpu(), DRAFTED, {"a": engine(1512, 1000)}) == ("False", "NotDrafting")


def test_a_drafter_that_goes_on_is_believed_again() -> None:
    assert active(tiny_cpu(), DRAFTED, {"a": engine(1600, 1000)}, {"a": engine(2200, 1600)}) == ("True", "Drafting")


@pytest.mark.parametrize(
    "speculation",
    [
        {"method": "ngram", "numSpeculativeTokens": 3},
        {"method": "suffix", "numSpeculativeTokens": 3},
        {
            **tiny_cpu()["speculation"],
            "numSpeculativeTokensByBatchSize": [{"from": 1, "to": 4, "numSpeculativeTokens": 0}],
        },
    ],
    ids=["a lookup that finds nothing", "answers that were never given before", "a schedule that says so"],
)
def test_steps_without_a_draft_may_be_as_asked(speculation: dict[str, Any]) -> None:
    assert active(tiny_cpu(speculation=speculation), DRAFTED, {"a": engine(2000, 1000)}) == ("True", "Drafting")


def test_an_engine_that_began_anew_is_counted_from_there() -> None:
    anew = after(DRAFTED, {"a": engine(100, 0)})
    assert anew.last == Work(1000, 1000, 3000, 1500), "the window that runs is not whole"
    assert update_recent(anew, {"a": engine(512, 0)}).last == Work(512)
    assert after(DRAFTED, {"a": engine(600, 600)}).last == Work(600, 600, 1800, 900)
    few = {"a": engine(1000, 100)}
    assert after(few, {"a": engine(600, 600)}).last == Work(600, 600, 1800, 900), "with more drafts than before"
    assert after(DRAFTED, {"a": engine(1200, 5)}).last == Work(1200, 5, 15, 8), "with more steps than before"
    caught_up = after(few, {"a": engine(100, 0)}, {"a": engine(1200, 150)})
    assert caught_up.last == Work(1200, 150, 450, 225), "it was seen to begin anew, and has more of all since"


def test_pods_that_vanish_come_and_miss_a_question_are_no_news() -> None:
    two = {"a": engine(1000, 1000), "b": engine(700, 700)}
    gone = after(two, {"a": engine(1300, 1300)}, {"a": engine(1400, 1400), "c": engine(112, 112)})
    assert gone.last == Work(512, 512, 1536, 768)
    assert after(two, {"a": Unreachable("busy")}) == after(two)


def test_other_engines_than_before_begin_anew() -> None:
    stopped = after(DRAFTED, {"a": engine(2000, 1000)})
    assert stopped.stopped_drafting
    assert not update_recent(stopped, {"new-a": engine(20, 20)}).stopped_drafting


@pytest.mark.parametrize(("now", "collapsed"), [(0.24, True), (0.25, False), (0.26, False)])
def test_acceptance_that_fell_below_half_is_told_beside_steps_without_a_draft(now: float, collapsed: bool) -> None:
    speculation = {
        **tiny_cpu()["speculation"],
        "numSpeculativeTokensByBatchSize": [{"from": 5, "to": 256, "numSpeculativeTokens": 0}],
    }
    tokens, good = 3 * 400, 1500
    seen = SpeculationReading(1400, 3000 + tokens, good + round(tokens * now), (700, 0, 0))
    later = {"a": reading(speculation=seen, decode_steps=2000, generation_tokens=2001)}
    rows = told(tiny_cpu(speculation=speculation), DRAFTED, later).speculation
    (row,) = (each for each in rows if each.feature == "numSpeculativeTokensByBatchSize")
    assert row.in_force == "True"
    assert ("less than half of what was accepted once" in row.message) is collapsed
