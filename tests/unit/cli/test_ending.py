"""How the command line ends: without a traceback, and with an exit code of its own."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.cli.main import TRACEBACK, Ending, run_to_its_end

SPECDECODE = (sys.executable, "-m", "specdecode_operator")
EXAMPLE = "examples/llama-8b-ngram.yaml"
ROOT = Path(__file__).parents[3]


def started(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SPECDECODE, *arguments], check=False, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=60, **options
    )


@pytest.mark.parametrize("arguments", [("plan", EXAMPLE), ("crds",), ("estimate", "--in", "-", "--out", "-")])
def test_a_full_disk_is_told_in_a_line(arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        ended = started(*arguments, stdout=full, input="{}\n")
    assert ended.returncode == Ending.NOT_WRITTEN
    assert ended.stderr == "error: standard output: No space left on device: write to another place\n"


def test_a_reader_that_has_enough_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = started("crds", stdout=writing)
    finally:
        os.close(writing)
    assert not ended.stderr
    assert ended.returncode


def test_the_exit_codes_are_the_documented_ones() -> None:
    documented = (ROOT / "docs/reference/cli.md").read_text(encoding="utf-8")
    assert all(f"| {code.value} |" in documented for code in Ending)
    assert TRACEBACK in documented


def fails_with(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyError("spec\n\x1b[31m"), Ending.DEFECT, "error: KeyError: "),
        (RecursionError("too deep"), Ending.DEFECT, "error: RecursionError: too deep"),
        (MemoryError(), Ending.DEFECT, "error: there is not enough memory"),
        (BrokenPipeError(), Ending.PIPE_CLOSED, ""),
        (KeyboardInterrupt(), Ending.INTERRUPTED, ""),
        (PermissionError(13, "Permission denied", "x.yaml"), Ending.NOT_WRITTEN, "error: x.yaml: Permission denied"),
        (SystemExit(4), 4, ""),
    ],
)
def test_whatever_happens_ends_in_a_line(
    error: BaseException, code: int, words: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["specdecode", "plan"])
    with pytest.raises(SystemExit) as ended:
        run_to_its_end(fails_with(error))
    said = capfd.readouterr().err
    assert ended.value.code == code
    assert said.startswith(words)
    assert said.count("\n") == bool(words)
    assert "\x1b" not in said


def test_a_traceback_is_shown_to_who_asks(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["specdecode", "plan"])
    monkeypatch.setenv(TRACEBACK, "1")
    with pytest.raises(SystemExit):
        run_to_its_end(fails_with(KeyError("spec")))
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.parametrize("command", ["operator", "capture-job"])
def test_a_pod_s_log_has_the_traceback(
    command: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["specdecode", command, "--verbose"])
    with pytest.raises(SystemExit):
        run_to_its_end(fails_with(KeyError("spec")))
    assert "Traceback" in capfd.readouterr().err
