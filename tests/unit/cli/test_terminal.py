"""What goes to a terminal: a conclusion, colours where they are wanted, and lines that have room."""

import json
import os
import pty
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import yaml

from specdecode_operator.cli import terminal
from tests.unit.cli.conftest import Specdecode, WriteObject, manifest

SPECDECODE = Path(sys.executable).parent / "specdecode"
GREEN, RED = "\x1b[32mFits\x1b[0m", "\x1b[31mDoesNotFit\x1b[0m"
H100 = {"accelerator": {"products": ["NVIDIA-H100-80GB-HBM3"]}}


@pytest.fixture(autouse=True)
def no_wishes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


class Stream:
    def __init__(self, *, terminal: bool) -> None:
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.mark.parametrize(
    ("is_terminal", "wishes", "wanted"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"TERM": "dumb"}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"NO_COLOR": ""}, True),
        (False, {"FORCE_COLOR": "1"}, True),
        (True, {"TERM": "dumb", "FORCE_COLOR": "1"}, True),
        (True, {"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
    ],
)
def test_colour_depends_on_the_terminal_and_the_environment(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, wishes: dict[str, str], wanted: bool
) -> None:
    for name, value in wishes.items():
        monkeypatch.setenv(name, value)
    assert terminal.wants_colour(Stream(terminal=is_terminal)) is wanted  # type: ignore[arg-type]


def test_verdicts_are_coloured_but_data_is_not(
    specdecode: Specdecode, write: WriteObject, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("a.yaml", manifest("a"))
    plain = specdecode("plan", path).stdout
    assert "\x1b" not in plain
    monkeypatch.setenv("FORCE_COLOR", "1")
    text = specdecode("plan", path).stdout
    assert GREEN in text
    assert RED in text
    assert text.replace(GREEN, "Fits").replace(RED, "DoesNotFit") == plain
    two = write("two.yaml", manifest("fits"), manifest("large", **H100))
    assert RED in specdecode("plan", two).stdout
    assert GREEN in specdecode("plan", "--explain", path).stdout
    for output, read in (("json", json.loads), ("yaml", yaml.safe_load)):
        data = specdecode("plan", path, "-o", output).stdout
        assert "\x1b" not in data
        assert read(data)["verdict"] == "Fits"


def test_escape_sequences_in_objects_are_escaped(
    specdecode: Specdecode, write: WriteObject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    body = manifest("a")
    body["spec"]["objective"] = "\x1b[31mFits"
    text = specdecode("plan", write("a.yaml", body)).stdout
    assert "\\x1b[31m" in text


def test_real_terminal_gets_colours_and_lines_of_its_width(write: WriteObject) -> None:
    path = write("a.yaml", manifest("a"))
    leader, follower = pty.openpty()
    with os.fdopen(leader, "rb", closefd=True) as screen:
        termios.tcsetwinsize(follower, (40, 90))
        # Without env it would inherit what readline has put beside os.environ: COLUMNS among it.
        env = dict(os.environ)
        process = subprocess.Popen([SPECDECODE, "plan", "--explain", path], stdout=follower, stderr=follower, env=env)
        os.close(follower)
        shown = b""
        while chunk := _read(screen.fileno()):
            shown += chunk
        assert process.wait() == 0
    text = shown.decode()
    assert GREEN in text
    lines = text.replace(GREEN, "Fits").replace("\r", "").splitlines()
    assert 80 < max(map(len, lines)) <= 90


def _read(terminal_fd: int) -> bytes:
    try:
        return os.read(terminal_fd, 65_536)
    except OSError:  # how Linux says that the other side has closed
        return b""


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_explain_fits_the_terminal_width(
    specdecode: Specdecode, write: WriteObject, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    path = write("a.yaml", manifest("a"))
    assert 80 < max(map(len, specdecode("plan", "--explain", path).stdout.splitlines())) <= 100, "piped"
    monkeypatch.setenv("COLUMNS", "400")
    whole = specdecode("plan", "--explain", path).stdout
    monkeypatch.setenv("COLUMNS", str(columns))
    narrow = specdecode("plan", "--explain", path).stdout
    assert max(map(len, narrow.splitlines())) <= columns
    assert sorted("".join(narrow.split())) == sorted("".join(whole.split())), "nothing is lost"


@pytest.mark.parametrize(
    ("spec", "conclusion"),
    [
        ({}, "Runs on 2 x H200, TP 2: 237,168 tokens (29.0 requests of 8192)"),
        (H100, "Does not fit on 2 x H100, TP 2; smallest change that fits: target.quantization: FP8"),
        (
            {**H100, "parallelism": {"tensor": 1}},
            "Does not fit on 1 x H100, TP 1; smallest change that fits: parallelism.tensor: 4",
        ),
        (
            {
                **H100,
                "target": {"model": "meta-llama/Llama-3.1-70B-Instruct", "quantization": "FP8"},
                "serving": {"maxModelLen": 8192, "minConcurrency": 15},
            },
            "Runs on 2 x H100, TP 2, but tight: 125,280 tokens (15.3 requests of 8192)",
        ),
    ],
)
def test_single_object_gets_a_conclusion_line(
    specdecode: Specdecode, write: WriteObject, spec: dict[str, object], conclusion: str
) -> None:
    assert specdecode("plan", write("a.yaml", manifest("a", **spec))).stdout.splitlines()[1] == conclusion
