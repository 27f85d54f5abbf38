"""Figures of a day of load that an autoscaler followed."""

from pathlib import Path

import pytest

from devcluster.autoscale_day import HOURS, RATES, SURGE_FROM, Day, Request, Sample, arrivals, rate_at


def day(*samples: tuple[float, int, int], requests: list[Request] | None = None) -> Day:
    """A day with these changes of the replicas: hour, wanted, ready. Requests take 4 s."""
    usual = [Request(float(hour), 4.0, 0.5, 100) for hour in range(HOURS)]
    return Day(usual if requests is None else requests, [Sample(*each) for each in samples], 5, 5, 2.0)


def test_arrivals_follow_the_rates_of_the_day_and_are_reproducible() -> None:
    found = arrivals(30.0)
    assert found == arrivals(30.0)
    assert found == sorted(found)
    in_hour = sum(10 <= each < 11 for each in found)
    assert in_hour == pytest.approx((RATES[10] + RATES[11]) / 2 * 30, rel=0.25)
    assert rate_at(SURGE_FROM) > rate_at(SURGE_FROM - 0.01) + 2


def test_needed_replicas_follow_from_the_rate_and_the_time_of_a_request() -> None:
    known = day((0, 1, 1))
    assert [known.needed(hour) for hour in (3, 10, 14)] == [1, 4, 4], "0.2, 3.8 and 4 requests/s of 4 s over 5"


def test_goodput_counts_tokens_of_requests_within_the_limit() -> None:
    slow, failed = Request(1.0, 9.0, 3.0, 100), Request(2.0, 120.0)
    figures = day((0, 1, 1), requests=[Request(0.0, 4.0, 0.5, 200), slow, failed]).figures()
    assert figures.goodput_percent == pytest.approx(200 / 3)
    assert (figures.requests, figures.failed) == (3, 1)


def test_replicas_that_were_never_needed_are_overshoot() -> None:
    assert day((0, 1, 1), (2, 3, 3), (4, 1, 1)).figures().overshoot == 2
    assert day((0, 1, 1)).figures().overshoot == 0


def test_scale_downs_that_are_taken_back_soon_are_oscillation() -> None:
    figures = day((0, 3, 3), (2, 2, 2), (2.5, 3, 3), (6, 2, 2), (9, 3, 3)).figures()
    assert (figures.changes, figures.reversals) == (4, 1)


def test_time_with_too_few_ready_replicas_is_counted() -> None:
    enough = day((0, 5, 5)).figures()
    late = day((0, 5, 1)).figures()
    assert enough.short_percent == 0
    assert 20 < late.short_percent < 80


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    day((0, 1, 1), (8, 4, 3), (22, 1, 1)).draw(tmp_path / "day.svg")
    assert "requests/s" in (tmp_path / "day.svg").read_text() or (tmp_path / "day.svg").stat().st_size > 10_000
