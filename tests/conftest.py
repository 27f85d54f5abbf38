"""What all tests share: the time of each part in the summary, and how properties are tried."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A busy machine is no failure, and a run finds what every other run finds.
settings.register_profile(
    "same everywhere", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("same everywhere")

TESTS = Path(__file__).parent
_seconds: Counter[str] = Counter()
_tests: Counter[str] = Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add a test's set-up, call and clean-up to its part."""
    part = Path(report.nodeid.partition("::")[0]).relative_to("tests").parts[0]
    _seconds[part] += report.duration
    _tests[part] += report.when == "call"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the time of each part of the suite."""
    terminalreporter.section("time by part")
    for part, seconds in _seconds.most_common():
        terminalreporter.write_line(f"{part:<12} {_tests[part]:>5} tests {seconds:>8.1f} s")
