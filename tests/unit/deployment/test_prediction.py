"""What the settings of a capture would bring, at the edge of what engines and captures may say."""

import pytest

from specdecode_operator.deployment.policy import Evidence, Memory, Point, Rules, Seen, Setting, decide
from specdecode_operator.enums import PolicyAction, PolicyMode, PolicyOutcome
from specdecode_operator.stats.engine_window import Sample, Window

NOW_S = 100_000.0


def window(*running: float) -> Window:
    """Looks at one engine, a minute apart."""
    found = Window(60.0 * len(running))
    for place, number in enumerate(running):
        found = found.add(Sample(NOW_S - 60.0 * (len(running) - 1 - place), number, {}))
    return found


def evidence(load: float = 1.0, goodput: float = 100.0) -> Evidence:
    settings = [Setting("on", [Point(load, load, 0.5, 0.4, 0.6)], 3, 0.5), Setting("off", [Point(load, load)])]
    return Evidence("capture", settings, [(load, goodput)])


@pytest.mark.parametrize(
    ("looks", "measured"),
    [
        (window(*[0.0] * 9, 2.0), evidence()),
        (window(*[2.0] * 10), evidence(load=1e308, goodput=5e-324)),
    ],
    ids=["the first request after an idle time", "far below what was measured"],
)
def test_engines_at_no_work_decide_nothing(looks: Window, measured: Evidence) -> None:
    assert looks.enough
    assert not looks.idle
    seen = Seen(NOW_S, looks)
    decision, _ = decide(Rules(PolicyMode.ENFORCE), measured, seen, Memory("on"), lambda _: "")
    assert decision.outcome is PolicyOutcome.KEPT
    assert decision.action is PolicyAction.KEEP
