"""CI runs every part of the suite, and every long test runs somewhere."""

import re
from pathlib import Path

from tests.parts import NAMES

ROOT = Path(__file__).parents[2]
WORKFLOWS = ROOT / ".github/workflows"


def test_every_part_runs_once_a_push() -> None:
    named = re.findall(r"\./just parts (.*)", (WORKFLOWS / "ci.yml").read_text())
    assert sorted(" ".join(named).split()) == sorted(NAMES)


def test_every_long_test_runs_at_night_or_weekly() -> None:
    text = "".join((WORKFLOWS / name).read_text() for name in ("long.yml", "empty-machine.yml"))
    run = [ROOT / path for path in re.findall(r"tests/[\w/.]+", text)]
    long = [path for path in ROOT.glob("tests/*/**/test_*.py") if re.search(r"pytest\.mark\.long", path.read_text())]
    assert len(long) > 10
    assert [path.name for path in long if not {path, *path.parents} & {*run}] == []
