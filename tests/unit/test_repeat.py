"""`./just repeat`: it tells flaky tests from those that always fail, and loads the machine meanwhile."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.parts import NAMES
from tests.repeat import PARTS, busy, main

ROOT = Path(__file__).parents[2]
TESTS = """
import os
from pathlib import Path

import pytest

ROUND = Path(__file__).with_name("round")
ROUND.write_text(str(int(ROUND.read_text()) + 1) if ROUND.exists() else "1")
IS_FIRST = ROUND.read_text() == "1"

@pytest.fixture
def broken():
    yield
    assert not IS_FIRST

def test_passes(): pass
def test_is_skipped(): pytest.skip("not here")
def test_fails(): assert 0
class TestGroup:
    @pytest.mark.parametrize("word", ["a.b", "a c"])
    def test_changes(self, word): assert word == "a c" or not IS_FIRST
def test_is_torn_down(broken): pass
"""


@pytest.fixture
def tests(tmp_path: Path) -> Path:
    """A file for made-up tests, below a root of its own for pytest."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path / "test_made_up.py"


def repeated(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.repeat", "--load=0", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def lines(text: str) -> list[str]:
    """The lines that name tests or rounds, of output or page, without paths."""
    return [line.strip(" -") for line in text.splitlines() if line.startswith(("  flaky", "  always", "  2 of", "- "))]


def test_flaky_tests_are_distinguished_from_always_failing_ones(tests: Path) -> None:
    page = tests.with_name("page.md")
    tests.write_text(TESTS)
    done = repeated(tests, "--times=2", f"--page={page}")
    expected = [
        "flaky: failed 1, passed 1: test_made_up.py::TestGroup::test_changes[a.b]",
        "flaky: failed 1, passed 1: test_made_up.py::test_is_torn_down",
        "always failed (2): test_made_up.py::test_fails",
    ]
    assert (done.returncode, lines(done.stdout)) == (1, expected), done.stdout + done.stderr
    assert lines(page.read_text()) == expected
    assert page.read_text().startswith("## paths: 5 tests, 2 rounds beside a load of 0\n")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["unti"], "unti"),
        (["lint"], "lint"),  # no tests
        (["tests/unit/test_nowhere.py::test_it"], "tests/unit/test_nowhere.py::test_it"),
        (["unit", "--times=0"], "'0'"),
        (["unit", "--load=-1"], "'-1'"),
        ([], "PART|PATH"),
    ],
)
def test_invalid_repeat_argument_is_named(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert named in capsys.readouterr().err


def test_every_part_with_tests_can_be_repeated() -> None:
    assert {*NAMES} - {*PARTS} == {"lint", "typing"}


def test_load_processes_end_with_the_block() -> None:
    with busy(2) as processes:
        assert [each.poll() for each in processes] == [None, None]
    assert None not in [each.poll() for each in processes]
