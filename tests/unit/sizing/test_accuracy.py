"""Accuracy against public logs."""

import json
import re
from pathlib import Path

import pytest

from bench.sizing.accuracy import (
    MemoryRow,
    TokenRow,
    calibrated_rows,
    later_rows,
    mean_error,
    mean_error_gib,
    memory_rows,
    other_rows,
    token_rows,
    worst_row,
)

MEMORY = memory_rows()
OTHER = other_rows()
LATER = later_rows()
CONFIRMED = calibrated_rows(LATER)
TOKENS = token_rows()


def test_mean_error_of_available_kv_memory_is_small() -> None:
    worst = worst_row(MEMORY)
    print(f"mean {mean_error(MEMORY):.3%}, worst {worst.case} {worst.error:+.2%}")  # noqa: T201 (shown on failure)
    assert len(MEMORY) == 26
    # Well below what one run may be off: an error that all runs share shows here first.
    assert mean_error(MEMORY) < 0.001


@pytest.mark.parametrize("row", MEMORY, ids=lambda row: row.case)
def test_error_of_available_kv_memory_is_small_in_each_run(row: MemoryRow) -> None:
    assert abs(row.error) < 0.01


def test_mean_error_of_later_calibrated_logs_is_small() -> None:
    assert len(CONFIRMED) == 17
    assert mean_error_gib(CONFIRMED) < 0.3


@pytest.mark.parametrize("row", CONFIRMED, ids=lambda row: row.case)
def test_error_of_each_later_calibrated_log_is_small(row: MemoryRow) -> None:
    assert abs(row.error_gib) < 0.35


@pytest.mark.parametrize("row", [*MEMORY, *OTHER, *LATER], ids=lambda row: row.case)
def test_promised_memory_is_at_most_the_measured_memory(row: MemoryRow) -> None:
    assert row.budget.margin_bytes > 0
    assert row.promised_gib <= row.measured_gib


def test_other_logs_cover_both_runners_and_pipeline_stages() -> None:
    assert {row.runner for row in OTHER} == {"V1", "V2"}
    assert any("pp2" in row.case for row in OTHER)


def test_at_least_30_logs_have_memory_and_tokens() -> None:
    assert len(TOKENS) >= 30


@pytest.mark.parametrize("row", TOKENS, ids=lambda row: row.case)
def test_kv_cache_tokens_match_the_logged_memory(row: TokenRow) -> None:
    assert row.fewest <= row.measured <= row.most


# The public start-up logs: where each was published is told, or that it is not known.

FOLDER = Path(__file__).parent / "groundtruth"
RUNS = [json.loads(line) for file in sorted(FOLDER.glob("*.jsonl")) for line in file.read_text().splitlines()]


def has_source(run: dict[str, str | None]) -> bool:
    if run["source_url"] is None:
        return (run["source"] or "").endswith("its address is not known")
    return re.fullmatch(r"https://\S+", run["source_url"]) is not None


def test_every_run_has_a_source_url_or_says_it_has_none() -> None:
    assert len({run["id"] for run in RUNS}) == len(RUNS) > 0
    assert [run["id"] for run in RUNS if not has_source(run)] == []


def test_readme_counts_the_runs_without_a_source_url() -> None:
    without = sum(run["source_url"] is None for run in RUNS)
    assert without == 9 + 7
    readme = " ".join((FOLDER / "README.md").read_text().split())
    assert (
        "Nine lines of `cases.jsonl`, and seven lines of the files that were added later, have no `source_url`"
        in readme
    )
