"""Policy decisions: the tables of docs/design/policy.md cell by cell, and days of scripted load."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from specdecode_operator.deployment.speculation_policy import (
    Evidence,
    Memory,
    NoEvidence,
    Point,
    Rules,
    Seen,
    Setting,
    decide,
)
from specdecode_operator.enums import PolicyAction, PolicyMode, PolicyOutcome
from specdecode_operator.stats.engine_window import Sample, Window, Work
from tests.support.policy_loads import SCRIPTS, Script, live, measured

PAGE = Path(__file__).parents[3] / "docs/design/policy.md"
ANY = "\N{EN DASH}"
NOW_S = 100_000.0
Row = dict[str, str]

CELLS = {
    "engines": ("settled", "rolling out"),
    "a replica decayed": ("yes", "no"),
    "evidence": ("there", "missing"),
    "acceptance": ("below the rule", "above it"),
    "window": ("short", "idle", "full"),
    "best setting": ("in force", "unclear", "other", "off", "on again"),
    "staying has cost": ("little", "enough"),
    "its plan": ("fits", "does not fit"),
}
LIMITS = {
    "rests on": ("goodput", "acceptance"),
    "mode": tuple(PolicyMode),
    "paused": ("yes", "no"),
    "since the last act": ("cooling down", "cooled down"),
    "starts in a day": ("left", "spent"),
}


def table(name: str) -> list[Row]:
    """The rows of a table of the page."""
    lines = iter(PAGE.read_text().partition(f"<!-- table: {name} -->")[2].lstrip().splitlines())
    header = cells(next(lines))
    next(lines)
    return [dict(zip(header, cells(line), strict=True)) for line in iter(lambda: next(lines), "")]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def situations(of: dict[str, tuple[str, ...]]) -> Iterator[Row]:
    return (dict(zip(of, values, strict=True)) for values in product(*of.values()))


def expected(rows: Sequence[Row], situation: Row) -> Row:
    """The first row that fits."""
    return next(row for row in rows if all(row[name] in (ANY, value) for name, value in situation.items()))


def window(situation: Row) -> Window:
    """Three engines, the last of which may have decayed, sampled every 15 s."""
    return _window(situation["window"], situation["acceptance"], situation["a replica decayed"])


@cache
def _window(length: str, acceptance: str, decayed: str) -> Window:
    seconds = 30 if length == "short" else 900
    running = 0.0 if length == "idle" else 16.0
    accepted = 0.3 if acceptance == "below the rule" else 0.8
    shares = (accepted, accepted, accepted / (4 if decayed == "yes" else 1))
    seen = Window(900.0)
    for at in range(0, seconds + 15, 15):
        engines = {
            f"engine-{number}": Work(0, at * 100, at * 300, round(at * 300 * share))
            for number, share in enumerate(shares)
        }
        seen = seen.add(Sample(NOW_S - seconds + at, running, engines))
    return seen


@cache
def evidence(best: str) -> Evidence:
    """Settings of which one is best at any load."""
    ratios = {"k3": 1.0, "k5": 1.0, "off": 1.0}
    better = {"other": "k5", "unclear": "k5", "off": "off", "on again": "k3"}.get(best)
    if better is not None:
        ratios[better] = 1.2
    width = 0.5 if best == "unclear" else 0.02
    settings = [
        Setting(name, [Point(16, 16, ratio, ratio - width, ratio + width)], 0 if name == "off" else int(name[1:]))
        for name, ratio in ratios.items()
    ]
    return Evidence("nightly", settings, [(16, 1000.0)])


def decided(situation: Row, limits: Row) -> tuple[str, str, str]:
    """What the code does: action, reason, outcome."""
    acceptance_alone = limits["rests on"] == "acceptance"
    best = situation["best setting"]
    budget = 2
    acts = {("cooling down", "left"): (10.0,), ("cooling down", "spent"): (10.0, 9_000.0)}
    acts |= {("cooled down", "left"): (), ("cooled down", "spent"): (9_000.0, 9_100.0)}
    ago = acts[limits["since the last act"], limits["starts in a day"]]
    rules = Rules(
        PolicyMode(limits["mode"]),
        limits["paused"] == "yes",
        restarts_a_day=budget,
        acceptance_rule=0.5,
        cooldown_s=1800.0,
    )
    memory = Memory(
        "off" if best == "on again" else "k3",
        restarts=tuple(NOW_S - each for each in ago),
        ahead_s=dict.fromkeys(("k3", "k5", "off"), 481.0 if situation["staying has cost"] == "enough" else 479.0),
    )
    missing = situation["evidence"] == "missing" or acceptance_alone
    seen = Seen(NOW_S, window(situation), situation["engines"] == "settled", start_s=240.0)
    decision, after = decide(
        rules,
        NoEvidence("NoEvidence", "no capture compared anything") if missing else evidence(best),
        seen,
        memory,
        lambda _: "" if situation["its plan"] == "fits" else "no room",
    )
    changed = after.restarts != memory.restarts
    assert changed == (decision.outcome is PolicyOutcome.DONE)
    return decision.action.value, decision.reason, decision.outcome.value


def test_every_situation_gives_the_action_of_its_documented_row() -> None:
    rows, reached = table("action"), set()
    limits = {"rests on": "goodput", "mode": "Enforce", "paused": "no"}
    limits |= {"since the last act": "cooled down", "starts in a day": "left"}
    for situation in situations(CELLS):
        row = expected(rows, situation)
        reached.add(rows.index(row))
        assert decided(situation, limits)[:2] == (row["action"], row["reason"]), situation
    assert reached == set(range(len(rows))), "a row that nothing comes to"


@pytest.mark.parametrize(
    ("best", "decayed", "action"), [("other", "no", "Change"), ("off", "no", "TurnOff"), ("other", "yes", "Restart")]
)
def test_every_limit_gives_the_outcome_of_its_documented_row(best: str, decayed: str, action: str) -> None:
    rows, reached = table("outcome"), set()
    situation = {name: values[0] for name, values in CELLS.items()} | {"window": "full", "staying has cost": "enough"}
    situation |= {"best setting": best, "a replica decayed": decayed}
    for limits in situations(LIMITS):
        if limits["rests on"] == "acceptance" and action != "TurnOff":
            continue
        row = expected(rows, limits)
        reached.add(rows.index(row))
        found = decided(situation, limits)
        assert (found[0], found[2]) == (action, row["outcome"]), limits
    assert len(reached) == len(rows) - (action != "TurnOff")


def asked(memory: Memory, *, budget: int = 6, best: str = "other") -> PolicyOutcome:
    """What becomes of the best setting, three minutes after a cool-down of half an hour."""
    situation = {name: values[0] for name, values in CELLS.items()} | {"window": "full", "a replica decayed": "no"}
    ahead_s = dict.fromkeys(("k3", "k5", "off"), 1000.0)
    seen = Seen(NOW_S, window(situation), start_s=240.0)
    rules = Rules(PolicyMode.ENFORCE, restarts_a_day=budget)
    memory = replace(memory, ahead_s=ahead_s, restarts=(NOW_S - 1980.0,))
    return decide(rules, evidence(best), seen, memory, lambda _: "")[0].outcome


def test_return_to_the_last_left_setting_has_a_longer_cooldown() -> None:
    assert asked(Memory("k3", left="off")) is PolicyOutcome.DONE
    assert asked(Memory("k3", left="k5")) is PolicyOutcome.COOLING_DOWN
    assert asked(Memory("k3", left="off"), best="off") is PolicyOutcome.DONE, "what loses is turned off all the same"


def test_trial_needs_budget_for_a_restart_to_undo_it() -> None:
    assert asked(Memory("off"), best="on again", budget=2) is PolicyOutcome.BUDGET_SPENT
    assert asked(Memory("off"), best="on again", budget=3) is PolicyOutcome.DONE


def test_acceptance_rule_does_not_apply_to_adaptive_verification() -> None:
    situation = {name: values[0] for name, values in CELLS.items()} | {"window": "full", "a replica decayed": "no"}
    seen = Seen(NOW_S, window(situation))
    missing = NoEvidence("NoEvidence", "no capture compared anything")
    found = [
        decide(Rules(acceptance_rule=0.5), missing, each, Memory("k3"), lambda _: "")[0].reason
        for each in (seen, replace(seen, counts_all=False))
    ]
    assert found == ["AcceptanceLow", "NoEvidence"]


def window_of(*running: float) -> Window:
    """Looks at one engine, a minute apart."""
    found = Window(60.0 * len(running))
    for place, number in enumerate(running):
        found = found.add(Sample(NOW_S - 60.0 * (len(running) - 1 - place), number, {}))
    return found


def evidence_at(load: float = 1.0, goodput: float = 100.0) -> Evidence:
    settings = [Setting("on", [Point(load, load, 0.5, 0.4, 0.6)], 3, 0.5), Setting("off", [Point(load, load)])]
    return Evidence("capture", settings, [(load, goodput)])


@pytest.mark.parametrize(
    ("looks", "measured"),
    [
        (window_of(*[0.0] * 9, 2.0), evidence_at()),
        (window_of(*[2.0] * 10), evidence_at(load=1e308, goodput=5e-324)),
    ],
    ids=["the first request after an idle time", "far below what was measured"],
)
def test_policy_keeps_the_setting_without_meaningful_load(looks: Window, measured: Evidence) -> None:
    assert looks.enough
    assert not looks.idle
    seen = Seen(NOW_S, looks)
    decision, _ = decide(Rules(PolicyMode.ENFORCE), measured, seen, Memory("on"), lambda _: "")
    assert decision.outcome is PolicyOutcome.KEPT
    assert decision.action is PolicyAction.KEEP


MOST_REGRET = 0.03


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_scripted_days_have_little_regret_and_no_flaps(script: Script) -> None:
    day = live(script, Rules(PolicyMode.ENFORCE), measured(), 900.0)
    assert tuple(day.done) == script.expected
    assert day.flaps == 0
    assert day.regret <= MOST_REGRET


def test_observe_mode_changes_nothing() -> None:
    spike = next(each for each in SCRIPTS if "spike of four" in each.name)
    day = live(spike, Rules(PolicyMode.OBSERVE), measured(), 900.0)
    assert (day.done, PolicyOutcome.OBSERVED in day.outcomes) == ([], True)
