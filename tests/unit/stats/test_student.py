"""Quantiles of Student's t."""

from statistics import NormalDist

import pytest

from specdecode_operator.stats.verdict import student_quantile


@pytest.mark.parametrize(
    ("freedom", "share", "quantile"),
    # Tables of every textbook, such as Abramowitz and Stegun 1964, table 26.10; the last four of
    # https://www.itl.nist.gov/div898/handbook/eda/section3/eda3672.htm
    [
        *[(1, 0.975, 12.706), (2, 0.975, 4.303), (3, 0.995, 5.841), (4, 0.975, 2.776), (30, 0.9, 1.310)],
        *[(120, 0.99, 2.358), (5, 0.995, 4.032), (5, 0.999, 5.893), (15, 0.999, 3.733), (31, 0.975, 2.040)],
    ],
)
def test_quantiles_are_those_of_tables(freedom: int, share: float, quantile: float) -> None:
    assert student_quantile(share, freedom) == pytest.approx(quantile, abs=5e-4)


def test_with_many_starts_it_is_the_normal_quantile() -> None:
    assert student_quantile(0.975, 10_000) == pytest.approx(NormalDist().inv_cdf(0.975), abs=1e-3)
