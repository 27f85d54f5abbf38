"""`specdecode capture report` on the folder of a capture with arms."""

import re
from html import unescape
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specdecode_operator.cli.main import app
from tests.support.compared_captures import PLAIN, SPECULATING, MadeCapture, rewrite

Words = tuple[str, str, Path]


def report(folder: Path, *options: str) -> Words:
    """Make a report, and return its words, what the command says of it on standard error, and where it is."""
    page = folder.parent / "page.html"
    done = CliRunner().invoke(app, ["capture", "report", str(folder), "-o", str(page), *options])
    assert done.exit_code == 0, done.stderr
    return unescape(re.sub(r"<style>.*?</style>|<[^>]*>", " ", page.read_text(), flags=re.DOTALL)), done.stderr, page


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Words:
    folder = tmp_path_factory.mktemp("made")
    capture = MadeCapture(arrivals="closed:2,closed:4", requests=32).make(folder / "capture")
    return report(capture, "--png", str(folder / "png"))


def test_arms_are_compared_before_each_is_drawn(made: Words) -> None:
    words, _, page = made
    assert re.search(r"drafted\s+Pays\s+Equal\s+goodput \+\d+ %", words)
    for title in ("Verdict by load", "Goodput by load", "Latency of the arms by load", "Acceptance of the arms"):
        assert title in words
    assert "of the drafted tokens" in words
    assert re.search(r"plain: \d+ tokens/s in closed-2", words)
    names = {path.stem for path in (page.parent / "png").iterdir()}
    assert {"arms-verdict", "arms-goodput", "arms-latency", "arms-acceptance", "step-time"} <= names


def test_one_repetition_of_each_arm_stands_for_it(made: Words) -> None:
    words, _, _ = made
    assert words.count("default/test/drafted · tiny · NVIDIA H100 80GB HBM3 · vLLM 0.33.0 · 64 requests") > 1
    assert "#2" not in words


def test_arms_that_cannot_be_compared_are_drawn_with_the_reason(tmp_path: Path) -> None:
    folder = MadeCapture(requests=8).make(tmp_path / "capture")
    rewrite(folder / "drafted" / "2" / "manifest.json", lambda each: each | {"seed": 99})
    words, errors, _ = report(folder)
    assert "its arms are not compared: workloads differ: seed of arm drafted" in words
    assert "workloads differ" in errors
    assert "Verdict by load" not in words
    assert "default/test/drafted · tiny" in words


def test_eight_arms_are_seven_in_pictures_and_eight_in_the_table_beside_what_makes_them_doubtful(
    tmp_path: Path,
) -> None:
    arms = {"plain": PLAIN} | {f"arm-{number}": SPECULATING for number in range(7)}
    folder = MadeCapture(arms=arms, requests=4).make(tmp_path / "capture")
    rewrite(folder / "arm-1" / "1" / "manifest.json", lambda each: each | {"node": "<b>other</b>"})
    words, _, page = report(folder)
    assert "The capture has 8 arms: 7 are drawn, all are in the table." in words
    assert re.search(r"arm-6\s+Inconclusive", words)
    assert "node is <b>other</b>, in the baseline node" in words
    assert "<b>other" not in page.read_text()
