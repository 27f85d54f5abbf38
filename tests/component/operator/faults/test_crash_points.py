"""The operator is killed at a call of an object's life: in the end all is as if it had not been."""

import logging
from collections.abc import Sequence

import pytest

from tests.component.operator.faults.lives import LIVES, Lives
from tests.support.faults.crash_points import CrashPoint, points_of_reads, points_of_writes

_logger = logging.getLogger(__name__)

TELLING = [
    # The children are made one by one, and what served is written down behind them, before the status vouches for it.
    CrashPoint("patch services tiny", moment="before"),
    CrashPoint("patch deployments.apps tiny"),
    CrashPoint("patch configmaps tiny-last-good"),
    # Engines give their GPUs away and get them back; what was measured is told once.
    CrashPoint("patch jobs.batch demo-capture"),
    CrashPoint("patch jobs.batch demo-capture", 2, "before"),
    CrashPoint("patch specdecodecaptures.specdecode.io/status demo", 6),
]


def test_capture_life_survives_kill_at_selected_calls(lives: Lives) -> None:
    missed = lives.disturbed("capture", TELLING)
    assert [point for point in missed if "/status" not in point] == [], "of status writes there may be fewer"


GIVING_BACK = [
    # The status borrows the GPUs, the Job takes them; the Job gives them back, the status tells the engines.
    CrashPoint("patch specdecodecaptures.specdecode.io/status demo", 2),
    CrashPoint("patch jobs.batch demo-capture", 2),
    CrashPoint("patch jobs.batch demo-capture", 3, "before"),
    CrashPoint("patch jobs.batch demo-capture", 3),
]


def test_kill_while_unstarted_capture_returns_gpus_is_survived(lives: Lives) -> None:
    missed = lives.disturbed("unstarted", GIVING_BACK)
    assert [point for point in missed if "/status" not in point] == [], "of status writes there may be fewer"


@pytest.mark.long
@pytest.mark.parametrize("name", LIVES)
def test_each_life_survives_kill_before_and_after_every_write(lives: Lives, name: str) -> None:
    each_alone(lives, name, points_of_writes(lives.undisturbed(name).calls))


@pytest.mark.long
def test_deployment_life_survives_kill_at_every_read(lives: Lives) -> None:
    each_alone(lives, "deployment", points_of_reads(lives.undisturbed("deployment").calls))


def each_alone(lives: Lives, name: str, points: Sequence[CrashPoint]) -> None:
    """Go through one life for each point."""
    failures, missed = [], []
    for point in points:
        try:
            missed += lives.disturbed(name, [point])
        except AssertionError as error:
            failures.append(f"{point}: {error}")
            _logger.warning("%s", failures[-1])
    _logger.warning("%s: killed at %d points; others that did not come: %s", name, len(points) - len(missed), missed)
    assert not failures
    assert len(missed) < len(points) / 4, "a status in between may come or not, as watches tell"
