"""Declines of acceptance and step time in the condition SpeculationEffective."""

from collections.abc import Callable, Iterable, Iterator
from random import Random
from typing import Any

import pytest

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.deployment_status import Condition
from specdecode_operator.deployment.conditions import ConditionUpdate
from specdecode_operator.deployment.observed.decay import (
    NOTHING_DECAYED,
    Decay,
    Decline,
    Measured,
    decay_condition,
    newest_measured,
    update_decay,
)
from specdecode_operator.deployment.observed.observation import Observation
from specdecode_operator.deployment.parsed_deployment import engine_spec_hash
from specdecode_operator.deployment.validation import valid_facts
from specdecode_operator.stats.engine_window import NOTHING_RECENT, update_recent
from specdecode_operator.vllm.engine_metrics import EngineReading, Reading
from tests.support.decisions import decide
from tests.support.engine_work import LOOK_S, Working
from tests.support.objects import Body, pair_70b, parent, tiny_cpu
from tests.unit.deployment.test_status import SERVING

NGRAM = {"method": "ngram", "numSpeculativeTokens": 4}


SPEC = SpecDecodeDeploymentSpec.model_validate(tiny_cpu())


class Watched:
    """A deployment whose engines are looked at again and again."""

    def __init__(self, spec: Body, measured: Measured | None = None, break_even: float | None = None) -> None:
        self.spec, self.facts = spec, valid_facts(SpecDecodeDeploymentSpec.model_validate(spec))
        self._measured, self._now_s = measured, 0.0
        self._break_even, self._recent = break_even, NOTHING_RECENT
        self._decay: Decay = NOTHING_DECAYED
        self._said: dict[str, Reading] = {}

    def look(self, **engines: Reading) -> ConditionUpdate | None:
        """Return the condition after a look."""
        self._now_s += LOOK_S
        self._said = engines
        self._recent = update_recent(self._recent, engines, self._now_s)
        self._decay = update_decay(
            self._decay, self._recent, self.facts, lambda: self._measured, lambda: self._break_even
        )
        return decay_condition(self._decay)

    def condition(self) -> Condition | None:
        """Return it as it stands in the status."""
        seen = Observation(SERVING, [], self._said, recent=self._recent, decay=self._decay)
        return decide(parent(self.spec), seen)[2].get("SpeculationEffective")

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


def test_falling_acceptance_is_reported_with_both_figures(engine: Working) -> None:
    watched, rng = Watched(draft_model()), Random(1)
    assert watched.looks(40, lambda: engine.works(0.6)) is None
    assert watched.looks(200, lambda: engine.works(0.6 + rng.gauss(0, 0.03))) is None
    told = watched.looks(100, lambda: engine.works(0.3 + rng.gauss(0, 0.03)))
    assert told is not None
    assert (told.status, told.reason) == ("False", "AcceptanceDecayed")
    assert all(part in told.message for part in ("8.0", "32%", "60%", "32 windows"))
    shown = watched.condition()
    assert shown is not None
    assert (shown.status, shown.reason, shown.message) == ("False", told.reason, told.message)
    # It does not move with each look.
    assert watched.look(a=engine.works(0.29)) == told
    for _ in range(8):
        told = watched.look(a=engine.works(0.6))
    assert told is None, "it is over once windows are as they were"
    assert watched.condition() is None


def test_acceptance_below_break_even_is_reported_without_a_baseline(engine: Working) -> None:
    watched, windows = Watched(draft_model()), 0
    while not (told := watched.look(a=engine.works(0.002))):
        windows += 1
        assert windows < 300
    assert windows > 100, "one bad hour of unusual requests is no evidence"
    assert (told.status, told.reason) == ("False", "BelowBreakEven")
    assert all(part in told.message for part in ("0.2%", "5.0%", "(1) the draft was made for another target"))
    shown = watched.condition()
    assert shown is not None
    assert (shown.status, shown.reason, shown.message) == ("False", told.reason, told.message)
    for _ in range(8):
        told = watched.look(a=engine.works(0.4))
    assert told is None, "another chat template may help without a restart"


def test_an_acceptance_around_the_limit_is_not_reported(engine: Working) -> None:
    watched, rng = Watched(draft_model()), Random(1)
    assert watched.looks(1000, lambda: engine.works(max(0.0, 0.07 + rng.gauss(0, 0.03)))) is None


def test_known_break_even_replaces_the_default_limit(engine: Working) -> None:
    """A draft of an eighth of the target's size with K 4 needs an eighth of its tokens accepted."""
    watched = Watched(draft_model(), break_even=0.125)
    told = watched.looks(400, lambda: engine.works(0.06))
    assert told is not None
    assert told.reason == "BelowBreakEven"
    assert all(part in told.message for part in ("6.0%", "12.5%", "memory-bound estimate"))
    assert Watched(draft_model(), break_even=1.0).looks(400, lambda: Working().works(0.99)) is None


ADAPTIVE = pair_70b(speculation=pair_70b()["speculation"] | {"adaptiveVerification": True})


def test_low_acceptance_of_long_drafts_is_not_below_break_even(engine: Working) -> None:
    """4 % of 16 tokens are 1.64 tokens per step, 4 % of 4 tokens are 1.16."""
    long = Working(k=16)
    assert Watched(draft_model(numSpeculativeTokens=16)).looks(400, lambda: long.works(0.04)) is None
    assert Watched(draft_model()).looks(1500, lambda: engine.works(0.04)) is not None


def test_impossible_counters_do_not_disable_decay_detection(engine: Working) -> None:
    watched = Watched(draft_model())
    for _ in range(2):
        assert watched.look(a=engine.works(50.0)) is None, "more tokens accepted than drafted"
    assert watched.looks(300, lambda: engine.works(0.0)) is not None


@pytest.mark.parametrize("spec", [ADAPTIVE, tiny_cpu(speculation={"method": "none"})])
def test_acceptance_that_reads_low_by_design_is_not_reported(engine: Working, spec: Body) -> None:
    assert Watched(spec).looks(400, lambda: engine.works(0.0)) is None


def test_little_traffic_is_not_reported_as_decay(engine: Working) -> None:
    watched = Watched(draft_model())
    assert watched.looks(400, lambda: engine.works(0.0, token_s=60)) is None, "32 steps in 16 requests of 2 tokens"
    idle = engine.reading
    assert watched.looks(400, lambda: idle) is None


@pytest.mark.parametrize(
    ("spec", "cause"),
    [
        (draft_model(), "draftSampling is not probabilistic"),
        (draft_model(), "map tokens differently"),
        ({**tiny_cpu(), "speculation": NGRAM}, "another method"),
    ],
)
def test_likely_causes_depend_on_the_method(engine: Working, spec: Body, cause: str) -> None:
    told = Watched(spec).looks(400, lambda: engine.works(0.0))
    assert told is not None
    assert cause in told.message


def test_probabilistic_drafts_get_no_advice_about_draft_sampling(engine: Working) -> None:
    told = Watched(draft_model(draftSampling="probabilistic")).looks(400, lambda: engine.works(0.0))
    assert told is not None
    assert "draftSampling" not in told.message


def test_slower_tokens_at_similar_load_are_reported(engine: Working) -> None:
    watched = Watched(draft_model())
    assert watched.looks(100, lambda: engine.works(0.6, token_s=0.02)) is None
    assert watched.looks(100, lambda: engine.works(0.6, token_s=0.04, running=64)) is None, "more requests take longer"
    told = watched.looks(100, lambda: engine.works(0.6, token_s=0.04))
    assert told is not None
    assert told.reason == "StepsSlower"
    assert all(part in told.message for part in ("40.0 ms", "20.0 ms"))


def changing_lengths(engine: Working) -> Iterator[EngineReading]:
    """K by batch size, or a grammar: drafts of another length are accepted otherwise."""
    for turn in range(40):
        yield from (engine.works(0.8, k=1) if turn % 2 else engine.works(0.4) for _ in range(12))


def test_changing_draft_length_is_not_reported_as_decay(engine: Working) -> None:
    watched, said = Watched(draft_model()), changing_lengths(engine)
    assert watched.looks(480, lambda: next(said)) is None


def test_ngram_decay_is_judged_by_accepted_tokens_per_step(engine: Working) -> None:
    watched = Watched(tiny_cpu(speculation=NGRAM))
    assert watched.looks(50, lambda: engine.works(0.6, drafting=0.5)) is None
    assert watched.looks(300, lambda: engine.works(0.3)) is None, "twice the drafts, half of each accepted"
    told = watched.looks(100, lambda: engine.works(0.1, drafting=0.2))
    assert told is not None
    assert told.reason == "DraftsBringLess"


def test_reset_counters_are_not_reported_as_decay(engine: Working) -> None:
    watched = Watched(draft_model())
    for _ in range(30):
        assert watched.looks(10, lambda: engine.works(0.6)) is None
        engine.reading = Working().reading


def capture(name: str, finished: str, percent: int | None = 70, **status: Any) -> Body:
    summary = {"requests": {"sent": 1, "completed": 1}, "acceptancePercent": percent, "meanAcceptanceLength": "3.80"}
    told = {"phase": "Succeeded", "engine": engine_spec_hash(SPEC), "finishedAt": finished, "summary": summary}
    return {"metadata": {"name": name}, "status": {**told, **status}}


def test_baseline_is_the_newest_succeeded_capture_of_the_same_engine() -> None:
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


BETWEEN_ALARMS = 1000


def alarm(losses: Iterable[float], between_alarms: float = BETWEEN_ALARMS) -> int | None:
    """Return after how many losses a decline is found."""
    known = Decline()
    for number, loss in enumerate(losses, start=1):
        known = known.after(loss, between_alarms)
        if known.found:
            return number
    return None


def test_false_alarm_rate_is_within_its_bound() -> None:
    """Losses as large as they may be on average, of any form: the worst that is no decline."""
    for seed, draw in enumerate(
        (
            lambda rng: rng.uniform(0, 2),
            lambda rng: 2.0 * (rng.random() < 0.5),
            lambda rng: 4.0 * (rng.random() < 0.25),
            lambda rng: min(4.0, rng.expovariate(1)),
        )
    ):
        rng, losses = Random(seed), 100
        found = sum(alarm(draw(rng) for _ in range(losses)) is not None for _ in range(300))
        # The probability is at most losses / BETWEEN_ALARMS, 0.1: 300 tries give 45 with one of 1 : 700.
        assert found <= 45, seed


def test_decline_ends_after_enough_acceptable_losses() -> None:
    known = Decline()
    while not known.found:
        known = known.after(2.0, BETWEEN_ALARMS)
    for loss in (2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0):
        known = known.after(loss, BETWEEN_ALARMS)
        assert known.found
    known = known.after(1.0, BETWEEN_ALARMS).after(1.0, BETWEEN_ALARMS)
    assert known == Decline()
