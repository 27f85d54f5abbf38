"""Sums that stay small are those of all values."""

from array import array

import numpy as np
import pytest

from specdecode_operator.capture.report.capture_sums import (
    LOG_BINS,
    ByTime,
    RequestSums,
    context_tokens,
    log_bin,
    log_quantile,
)
from specdecode_operator.capture.trace_reader import RecordedRequest


def request(chunks: list[int], gaps_ms: list[float], **fields: object) -> RecordedRequest:
    usual = {"arrival_ms": 0.0, "prompt_tokens": 16, "cached_tokens": 0, "ttft_ms": 30.0}
    return RecordedRequest(**{**usual, **fields}, chunk_tokens=array("I", chunks), gaps_ms=array("d", gaps_ms))  # type: ignore[arg-type]


def test_bins_of_time_double_their_width_and_lose_nothing() -> None:
    bins = ByTime(1, most=8)
    moments = np.arange(10_000.0)
    for part in np.split(moments, 10):
        bins.add(part, np.ones(len(part)))
    assert len(bins.times_ms) <= 8
    assert bins.sums[:, 0].sum() == 10_000
    assert bins.sums[0, 0] == bins.width_ms, "one a millisecond"
    assert (np.abs(np.diff(bins.times_ms)) == bins.width_ms).all()


def test_coarser_bins_hold_the_same_and_the_largest_value() -> None:
    bins = ByTime(1)
    bins.add(np.arange(1000.0), np.arange(1000.0))
    coarse = bins.coarser(4)
    assert len(coarse.times_ms) <= 4
    assert coarse.sums.sum() == bins.sums.sum() == 499_500
    assert coarse.largest.max() == 999


def test_what_is_no_moment_is_left_out() -> None:
    bins = ByTime(1)
    bins.add(np.array([float("nan"), 1e300, 5.0]), np.ones(3))
    assert bins.sums.sum() == 1


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.99])
def test_quantiles_of_a_log_histogram_are_within_half_a_percent(share: float) -> None:
    values = np.random.default_rng(1).lognormal(2, 1, 100_000)
    counts = np.bincount(log_bin(values), minlength=LOG_BINS)
    assert log_quantile(counts, share) == pytest.approx(np.quantile(values, share), rel=0.005)


def test_bursts_are_all_chunks_but_the_first() -> None:
    sums = RequestSums()
    sums.add(request([9, 3, 1], [10.0, 20.0]))
    sums.add(request([1], []))
    sums.add(request([2, 3], [30.0], arrival_ms=100.0))
    sums.flush()
    assert list(sums.bursts[:5]) == [0, 1, 0, 2, 0]
    assert sums.mean_burst == pytest.approx(7 / 3)
    assert log_quantile(sums.gaps[3], 0.1) == pytest.approx(10, rel=0.005)
    assert log_quantile(sums.gaps[3], 0.9) == pytest.approx(30, rel=0.005)
    assert list(sums.output_tokens) == [13, 1, 5]
    assert sums.tpot_ms[0] == pytest.approx(30 / 12)
    # By the moment of each burst: 40, 60 and 160 ms.
    assert list(sums.by_time.times_ms // 16) == [2, 3, 10]
    assert list(sums.by_time.sums[:, 1]) == [3, 1, 3]


def test_context_is_the_prompt_and_the_output_so_far() -> None:
    sums = RequestSums()
    sums.add(request([16, 32, 5], [1.0, 1.0]))
    sums.flush()
    (bins,) = np.nonzero(sums.by_context.sums[:, 0])
    assert list(sums.by_context.sums[bins, 1]) == [32, 5]
    assert list(np.floor(context_tokens(bins) / 2**0.125)) == [32, 64]
