"""What each measured setting would bring at the load of the last minutes."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from specdecode_operator.policy.evidence import Evidence, Setting
from specdecode_operator.policy.window import Window


@dataclass(frozen=True)
class Predicted:
    """One setting at the load that there is, against the one in force."""

    setting: Setting
    gain: float
    """Goodput more than that of the setting in force, as a share of it."""

    low: float
    """The least that it may be by the intervals of both."""

    thirds: tuple[float, ...]
    """The gain in each third of the window, the newest last: what is short, or over already, is not in all of them."""

    running: float
    measured: bool
    in_force: str

    def __str__(self) -> str:
        beyond = "" if self.measured else ", beyond what was measured"
        return (
            f"with {self.running:.1f} requests running at once in a replica{beyond}, {self.setting.name} brings"
            f" {self.gain:+.1%} goodput against {self.in_force} ({self.low:+.1%} at least)"
        )


@dataclass(frozen=True)
class Prediction:
    """All settings but the one in force, best first."""

    in_force: str
    running: float
    acceptance_factor: float
    """Acceptance over what was measured."""

    others: Sequence[Predicted]

    def better(self, min_gain: float, failed: Collection[str]) -> Predicted | None:
        """Return the best setting that is surely better, and by enough."""
        return next((each for each in self._allowed(min_gain, failed) if each.low > 0), None)

    def unclear(self, min_gain: float, failed: Collection[str]) -> Predicted | None:
        """Return the best setting that is better by enough, but not surely."""
        return next(iter(self._allowed(min_gain, failed)), None)

    def best_in_force(self, min_gain: float) -> str:
        """Return the sentence that says that nothing is better."""
        return (
            f"with {self.running:.1f} requests running at once in a replica, no measured setting brings"
            f" {min_gain:.0%} more than {self.in_force}"
        )

    def _allowed(self, min_gain: float, failed: Collection[str]) -> list[Predicted]:
        return [
            each
            for each in self.others
            if min(each.gain, *each.thirds) >= min_gain and not each.setting.refused and each.setting.name not in failed
        ]


def predict(evidence: Evidence, in_force: str, window: Window, acceptance_factor: float) -> Prediction | None:
    """Return what the settings would bring; None where the one in force was not measured.

    Goodput is summed over the looks of the window and not taken at their mean: between two loads that take turns the
    best setting may be neither's.
    """
    present = evidence.find(in_force)
    if present is None:
        return None
    spans = window.spans()
    seconds = sum(each for _, each in spans)
    running = sum(number * each for number, each in spans) / seconds
    loads = [present.load_at(number) for number, _ in spans]
    work = [each * evidence.goodput_at(load) for load, (_, each) in zip(loads, spans, strict=True)]
    measured = all(evidence.measured(load) for load, weight in zip(loads, work, strict=True) if weight)
    third = -(-len(loads) // 3)
    parts = [slice(None), *(slice(start, start + third) for start in range(0, len(loads), third))]
    mine = _goodput(present, loads, work, acceptance_factor)
    # Nothing ran where the newest look alone saw a request, which stands for no time yet.
    most, others = sum(each[2] for each in mine), []
    for setting in evidence.settings:
        if setting.name != in_force:
            its = _goodput(setting, loads, work, acceptance_factor)
            gain, *thirds = (_gain(its, mine, part) for part in parts)
            low = sum(each[1] for each in its) / most - 1 if most else 0.0
            others.append(Predicted(setting, gain, low, tuple(thirds), running, measured, in_force))
    others.sort(key=lambda each: each.gain, reverse=True)
    return Prediction(in_force, running, acceptance_factor, others)


_Goodput = list[tuple[float, float, float]]
"""Of each look, with its low and its high end, in units of the baseline's."""


def _goodput(setting: Setting, loads: Sequence[float], work: Sequence[float], factor: float) -> _Goodput:
    tokens = setting.tokens_a_step(factor)
    ratios = map(setting.ratio_at, loads)
    return [
        (ratio * weight * tokens, low * weight * tokens, high * weight * tokens)
        for (ratio, low, high), weight in zip(ratios, work, strict=True)
    ]


def _gain(its: _Goodput, mine: _Goodput, part: slice) -> float:
    """Return what a setting brings more than the one in force in a part of the looks; 0 where nothing ran."""
    present = sum(each[0] for each in mine[part])
    return sum(each[0] for each in its[part]) / present - 1 if present else 0.0
