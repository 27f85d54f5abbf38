"""What a policy costs against an oracle that knows the whole day: `python -m bench.evidence.policy`.

Goodput of each setting at each load is measured on replay engines in virtual time; the policy looks every 15 seconds.
"""

from collections.abc import Iterator

from specdecode_operator.deployment.speculation_policy import Rules
from specdecode_operator.enums import PolicyAction, PolicyMode
from tests.support.policy_loads import SCRIPTS, live, measured

_ROUND_S = 15.0
_WINDOW_S = 900.0


def report() -> Iterator[str]:
    """Return all figures, line by line."""
    evidence = measured()
    loads = [point.load for point in evidence.settings[0].points]
    yield f"{'goodput against k3, at running requests':44}" + "".join(f"{load:>8.0f}" for load in loads)
    for setting in evidence.settings:
        yield f"{setting.name:44}" + "".join(f"{point.ratio:8.2f}" for point in setting.points)
    yield ""
    yield f"{'a day of':44}{'regret':>8}{'changes':>9}{'oracle':>8}{'in vain':>9}{'flaps':>7}  what is done, and when"
    for script in SCRIPTS:
        day = live(script, Rules(PolicyMode.ENFORCE), evidence, _WINDOW_S, _ROUND_S)
        told = ", ".join(f"{action} {hour:.1f}" for action, hour in zip(day.done, day.at_hours, strict=True))
        changes = sum(action is not PolicyAction.RESTART for action in day.done)
        counts = f"{changes:9}{day.best_changes:8}{day.in_vain:9}{day.flaps:7}"
        yield f"{script.name:44}{day.regret:8.2%}{counts}  {told}"


if __name__ == "__main__":
    for line in report():
        print(line, flush=True)
