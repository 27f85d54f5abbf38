"""Losses that are watched without end: a decline is found, and nothing is found without one."""

from collections.abc import Iterable
from random import Random
from statistics import median

from specdecode_operator.deployment.observed.decay import Decline

BETWEEN_ALARMS = 1000


def alarm(losses: Iterable[float], between_alarms: float = BETWEEN_ALARMS) -> int | None:
    """Return after how many losses a decline is found."""
    known = Decline()
    for number, loss in enumerate(losses, start=1):
        known = known.after(loss, between_alarms)
        if known.found:
            return number
    return None


def test_false_alarms_are_no_more_frequent_than_promised() -> None:
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


def test_losses_that_are_as_they_should_be_never_alarm() -> None:
    rng = Random(5)
    assert alarm(rng.uniform(0.5, 1.2) for _ in range(20_000)) is None


def test_the_larger_the_losses_the_sooner_they_are_found() -> None:
    rng = Random(6)
    after = [
        median(alarm(rng.gauss(mean, 0.2) for _ in range(5000)) or 5000 for _ in range(9)) for mean in (1.2, 1.5, 2.0)
    ]
    assert after == sorted(after, reverse=True)
    assert after[0] < 200
    assert after[-1] < 20


def test_it_is_over_when_the_last_losses_are_as_they_may_be() -> None:
    known = Decline()
    while not known.found:
        known = known.after(2.0, BETWEEN_ALARMS)
    for loss in (2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0):
        known = known.after(loss, BETWEEN_ALARMS)
        assert known.found
    known = known.after(1.0, BETWEEN_ALARMS).after(1.0, BETWEEN_ALARMS)
    assert known == Decline()


def test_one_moment_does_not_decide() -> None:
    assert alarm([*[0.9] * 50, 1e9, *[0.9] * 50]) is None
    assert alarm([*[0.9] * 50, float("inf"), *[0.9] * 50]) is None
