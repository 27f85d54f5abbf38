"""CI runs every part of the suite, and every long test runs somewhere."""

import os
import re
import subprocess
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(("issues", "expected"), [("", "issue create --title vLLM 0.34"), ("17", "issue edit 17")])
def test_a_new_engine_is_told_in_one_issue(tmp_path: Path, issues: str, expected: str) -> None:
    text = "# vLLM 0.34: what to look at, against 0.33\n\n- Tests: all\n" + "x" * 100_000
    (tmp_path / "page.md").write_text(text)
    said, body = _tell(tmp_path, issues)
    assert said[-1].startswith(expected)
    assert body.startswith("- Tests: all\n")
    assert body.endswith("were begun: https://run\n")
    assert len(body) < 65_536


def test_a_release_that_is_known_is_not_told(tmp_path: Path) -> None:
    (tmp_path / "page.md").touch()
    assert _tell(tmp_path, "") == ([], "")


def _tell(folder: Path, issues: str) -> tuple[list[str], str]:
    """Return what a stand-in for gh was called with, a line a call, and the text of the issue."""
    gh = folder / "gh"
    gh.write_text(
        f'#!/bin/sh\necho "$@" >>{folder}/calls\n'
        f'[ "$2" = list ] && printf "%s" "{issues}"\n'
        f'for each; do [ ! -f "$each" ] || cp "$each" {folder}/body; done\n'
    )
    gh.chmod(0o755)
    command = [ROOT / ".github/engine-new-issue", folder / "page.md", "https://run"]
    subprocess.run(command, check=True, env=os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"})
    calls, body = folder / "calls", folder / "body"
    return (calls.read_text().splitlines(), body.read_text()) if calls.exists() else ([], "")
