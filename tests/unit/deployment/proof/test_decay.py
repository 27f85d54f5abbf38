"""The condition Decayed: told when drafts bring less or tokens take longer than before, and of nothing else."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.deployment_status import Condition
from specdecode_operator.deployment.conditions import ConditionUpdate
from specdecode_operator.deployment.observed.decay import (
    NOTHING_DECAYED,
    Decay,
    Measured,
    decay_conditions,
    newest_measured,
    update_decay,
)
from specdecode_operator.deployment.observed.observation import Observation
from specdecode_operator.deployment.parsed_deployment import engine_spec_hash
from specdecode_operator.deployment.validation import valid_facts
from specdecode_operator.stats.engine_window import NOTHING_RECENT, Recent, update_recent
from specdecode_operator.vllm.engine_metrics import EngineReading, Reading, Unreachable
from tests.support.decisions import decide
from tests.support.engine_work import LOOK_S, Working
from tests.support.objects import Body, parent, tiny_cpu
from tests.unit.deployment.test_deployment_status import SERVING

NGRAM = {"method": "ngram", "numSpeculativeTokens": 4}


SPEC = SpecDecodeDeploymentSpec.model_validate(tiny_cpu())


class Watched:
    """A deployment whose engines are looked at again and again."""

    def __init__(self, spec: Body, measured: Measured | None = None) -> None:
        self.spec, self.facts = spec, valid_facts(SpecDecodeDeploymentSpec.model_validate(spec))
        self._measured, self._now_s = measured, 0.0
        self._recent: Recent = NOTHING_RECENT
        self._decay: Decay = NOTHING_DECAYED
        self._said: dict[str, Reading] = {}

    def look(self, **engines: Reading) -> ConditionUpdate | None:
        """Return the condition after a look."""
        self._now_s += LOOK_S
        self._said = engines
        self._recent = update_recent(self._recent, engines, self._now_s)
        self._decay = update_decay(self._decay, self._recent, self.facts, lambda: self._measured)
        return next(iter(decay_conditions(self._decay)), None)

    def condition(self) -> Condition | None:
        """Return it as it stands in the status."""
        seen = Observation(SERVING, [], self._said, recent=self._recent, decay=self._decay)
        return decide(parent(self.spec), seen)[2].get("Decayed")

    def looks(self, count: int, work: Callable[[], EngineReading]) -> ConditionUpdate | None:
        """Return the condition as soon as there is one; what engines do is asked before each look."""
        for _ in range(count):
            if told := self.look(a=work()):
                return told
        return None


@pytest.fixture
def engine() -> Working:
    return Working()


def draft_model(**speculation: Any) -> Body:
    spec = tiny_cpu()
    return {**spec, "speculation": spec["speculation"] | {"numSpeculativeTokens": 4} | speculation}


def test_acceptance_that_falls_is_told_with_both_figures(engine: Working) -> None:
    watched, rng = Watched(draft_model()), Random(1)
    assert watched.looks(40, lambda: engine.works(0.6)) is None
    assert watched.looks(200, lambda: engine.works(0.6 + rng.gauss(0, 0.03))) is None
    told = watched.looks(100, lambda: engine.works(0.3 + rng.gauss(0, 0.03)))
    assert told is not None
    assert (told.status, told.reason) == ("True", "AcceptanceDecayed")
    assert "with 8.0 requests at once in an engine 29%" in told.message
    assert "60% were in the first 32 windows at such a load" in told.message
    assert "higher temperature" in told.message
    shown = watched.condition()
    assert shown is not None
    assert (shown.status, shown.reason, shown.message) == ("True", told.reason, told.message)
    # It does not move with each look.
    assert watched.look(a=engine.works(0.29)) == told
    for _ in range(8):
        told = watched.look(a=engine.works(0.6))
    assert told is None, "it is over once windows are as they were"
    assert watched.condition() is None


def test_tokens_that_take_longer_at_a_like_load_are_told(engine: Working) -> None:
    watched = Watched(draft_model())
    assert watched.looks(100, lambda: engine.works(0.6, token_s=0.02)) is None
    assert watched.looks(100, lambda: engine.works(0.6, token_s=0.04, running=64)) is None, "more requests take longer"
    told = watched.looks(100, lambda: engine.works(0.6, token_s=0.04))
    assert told is not None
    assert told.reason == "StepsSlower"
    assert "a token takes 40.0 ms, and took 20.0 ms" in told.message


def test_without_speculation_time_alone_is_looked_at(engine: Working) -> None:
    watched = Watched({**tiny_cpu(), "speculation": None})
    assert watched.looks(100, lambda: engine.works(0, k=0)) is None
    told = watched.looks(100, lambda: engine.works(0, k=0, token_s=0.03))
    assert told is not None
    assert told.reason == "StepsSlower"


def changing_lengths(engine: Working) -> Iterator[EngineReading]:
    """K by batch size, or a grammar: drafts of another length are accepted otherwise."""
    for turn in range(40):
        yield from (engine.works(0.8, k=1) if turn % 2 else engine.works(0.4) for _ in range(12))


def test_drafts_of_another_length_are_another_setting(engine: Working) -> None:
    watched, said = Watched(draft_model()), changing_lengths(engine)
    assert watched.looks(480, lambda: next(said)) is None


def test_acceptance_under_adaptive_verification_is_low_by_design(engine: Working) -> None:
    watched = Watched(draft_model())
    assert watched.facts.pair.adaptive_verification is False
    watched.facts = replace(watched.facts, pair=replace(watched.facts.pair, adaptive_verification=True))
    assert watched.looks(50, lambda: engine.works(0.6)) is None
    assert watched.looks(300, lambda: engine.works(0.1)) is None


def test_what_a_lookup_proposes_is_judged_by_what_it_brings(engine: Working) -> None:
    watched = Watched(tiny_cpu(speculation=NGRAM))
    assert watched.looks(50, lambda: engine.works(0.6, drafting=0.5)) is None
    assert watched.looks(300, lambda: engine.works(0.3)) is None, "twice the drafts, half of each accepted"
    told = watched.looks(100, lambda: engine.works(0.1, drafting=0.2))
    assert told is not None
    assert told.reason == "DraftsBringLess"


def test_too_little_work_says_nothing(engine: Working) -> None:
    watched = Watched(draft_model())
    watched.looks(50, lambda: engine.works(0.6))
    assert watched.looks(200, lambda: engine.reading) is None
    # 40 looks make a window: five of them are no decline.
    assert watched.looks(200, lambda: engine.works(0.0, token_s=1.0, running=1)) is None


def test_counters_that_begin_anew_are_no_decline(engine: Working) -> None:
    watched = Watched(draft_model())
    for _ in range(30):
        assert watched.looks(10, lambda: engine.works(0.6)) is None
        engine.reading = Working().reading


def test_engines_that_take_the_place_of_others_are_held_to_themselves(engine: Working) -> None:
    watched, other = Watched(draft_model()), Working()
    watched.looks(50, lambda: engine.works(0.6))
    for _ in range(200):
        assert watched.look(b=other.works(0.3, token_s=0.05)) is None


def test_an_engine_that_misses_questions_hides_nothing(engine: Working) -> None:
    watched, rng = Watched(draft_model()), Random(2)
    other = Working()

    def turn(acceptance: float) -> ConditionUpdate | None:
        seen: Reading = other.works(acceptance)
        return watched.look(a=engine.works(acceptance), b=Unreachable("slow") if rng.random() < 0.3 else seen)

    assert [turn(0.6) for _ in range(200)] == [None] * 200
    assert any(turn(0.2) for _ in range(100))


def capture(name: str, finished: str, percent: int | None = 70, **status: Any) -> Body:
    summary = {"requests": {"sent": 1, "completed": 1}, "acceptancePercent": percent, "meanAcceptanceLength": "3.80"}
    told = {"phase": "Succeeded", "engine": engine_spec_hash(SPEC), "finishedAt": finished, "summary": summary}
    return {"metadata": {"name": name}, "status": {**told, **status}}


def test_the_newest_capture_of_these_engines_that_succeeded_is_asked() -> None:
    captures = [
        capture("old", "2026-01-01T00:00:00Z", 90),
        capture("last", "2026-01-03T00:00:00Z"),
        capture("before", "2026-01-02T00:00:00Z", 90),
        capture("of-another-spec", "2026-01-05T00:00:00Z", engine="other"),
        capture("failed", "2026-01-05T00:00:00Z", phase="Failed"),
        capture("without-drafts", "2026-01-05T00:00:00Z", None),
        capture("written-by-hand", "2026-01-05T00:00:00Z", summary={"acceptancePercent": "x"}),
        {"metadata": {"name": "new"}},
    ]
    assert newest_measured(captures, SPEC, None) == Measured("last", 0.7, pytest.approx(2.8))
    assert newest_measured(captures, SPEC.model_copy(update={"speculation": None}), None) is None


def test_what_the_newest_capture_found_counts_where_it_is_more(engine: Working) -> None:
    watched = Watched(draft_model(), Measured("nightly", acceptance=0.7, gain=2.8))
    told = watched.looks(200, lambda: engine.works(0.4))
    assert told is not None
    assert "40% of the drafted tokens are accepted, and 70% were in capture nightly" in told.message
    assert "drafts bring 1.60 tokens a step, and brought 2.80 in capture nightly" in told.message
    lower = Watched(draft_model(), Measured("random", acceptance=0.2, gain=0.8))
    assert lower.looks(50, lambda: engine.works(0.6)) is None
    told = lower.looks(200, lambda: engine.works(0.3))
    assert told is not None
    assert "60% were in the first" in told.message
