"""The API server's time as the operator learns it from responses."""

import logging
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from specdecode_operator.cluster.clock import ServerTime
from tests.support.driven_clock import DrivenServerTime

NOON = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
HOUR_S = 3600.0


class Steady:
    """A steady clock that stands still between the steps of a test."""

    def __init__(self) -> None:
        self.passed_s = 1000.0

    def __call__(self) -> float:
        return self.passed_s


def answered(clock: ServerTime, steady: Steady, moment: datetime, *, took_s: float = 0.0) -> None:
    """Let an answer come that the server wrote at a moment, just before it arrived."""
    asked_s = steady()
    steady.passed_s += took_s
    clock.hear(format_datetime(moment.replace(microsecond=0), usegmt=True), asked_s)


def test_local_clock_is_used_until_the_first_answer() -> None:
    steady = Steady()
    clock = ServerTime(steady, local=NOON.timestamp)
    assert (clock.now(), clock.is_known) == (NOON, False)
    answered(clock, steady, NOON - timedelta(days=30))
    assert (clock.now(), clock.is_known) == (NOON - timedelta(days=30), True)


def test_time_advances_between_answers_independent_of_the_local_clock() -> None:
    steady, local_s = Steady(), [NOON.timestamp()]
    clock = ServerTime(steady, local=lambda: local_s[0])
    answered(clock, steady, NOON)
    local_s[0] += 1e7
    steady.passed_s += 90
    assert clock.now() == NOON + timedelta(seconds=90)


def test_time_is_never_ahead_of_the_server_and_converges() -> None:
    """The header has whole seconds, and its answer may be on its way for long."""
    steady = Steady()
    clock, begun_s = ServerTime(steady), steady()

    def server() -> datetime:
        return NOON + timedelta(seconds=steady() - begun_s)

    answered(clock, steady, server(), took_s=20.0)
    errors = [server() - clock.now()]
    for step_s in (7.31, 0.99, 3.6, 11.25, 0.47, 5.93):
        steady.passed_s += step_s
        answered(clock, steady, server(), took_s=0.01)
        errors.append(server() - clock.now())
    assert all(timedelta(0) <= error for error in errors)
    assert errors[0] == timedelta(seconds=20)
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < timedelta(seconds=0.2)


@pytest.mark.parametrize("header", [None, "", "yesterday", "Sat, 99 Nov 2026 12:00:00 GMT", "12", "\x00" * 99])
def test_invalid_date_header_is_ignored(header: str | None) -> None:
    clock = ServerTime(Steady(), local=NOON.timestamp)
    clock.hear(header, 0.0)
    assert (clock.now(), clock.is_known, clock.agreed_s()) == (NOON, False, 0.0)


def test_one_wrong_server_clock_does_not_move_time_and_is_a_dispute() -> None:
    clock = DrivenServerTime(NOON)
    for _ in range(20):
        clock.advance(60)
        right = clock.now()
        clock.answer(right + timedelta(days=40))
        assert clock.now() == right
        clock.answer(right)
    assert clock.disputed_within(HOUR_S)
    assert clock.agreed_s() == 0.0
    clock.advance(HOUR_S)
    assert not clock.disputed_within(HOUR_S)
    assert clock.agreed_s() == HOUR_S


@pytest.mark.parametrize("by_s", [-40 * 86_400, 40 * 86_400])
def test_changed_server_clock_is_accepted_after_minutes_of_agreement(by_s: float) -> None:
    clock = DrivenServerTime(NOON)
    clock.advance(2 * HOUR_S)
    assert clock.agreed_s() == 2 * HOUR_S
    before = clock.now()
    clock.answer(before + timedelta(seconds=by_s))
    assert clock.now() == before
    clock.jump(0)
    assert abs((clock.now() - before).total_seconds() - by_s) <= 400
    assert clock.disputed_within(HOUR_S)
    assert clock.agreed_s() == 0.0


def test_clocks_a_few_seconds_apart_are_no_dispute() -> None:
    clock = DrivenServerTime(NOON)
    for _ in range(30):
        clock.advance(60)
        clock.answer(clock.now() + timedelta(seconds=4))
        clock.answer(clock.now() - timedelta(seconds=4))
    assert not clock.disputed_within(HOUR_S)
    assert abs((clock.now() - NOON).total_seconds() - 1800) < 10


def test_wrong_node_clock_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    steady = Steady()
    with caplog.at_level(logging.WARNING):
        answered(ServerTime(steady, local=lambda: NOON.timestamp() + 5), steady, NOON)
        assert not caplog.records
        answered(ServerTime(steady, local=lambda: NOON.timestamp() + 86_400), steady, NOON)
    assert "86400 s ahead of" in caplog.text
