"""A capture that is held against a golden one judges itself at its end, and says so in its termination message."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from specdecode_operator.api.capture import Regressed, RegressionStatus
from specdecode_operator.capture.comparison import regression
from specdecode_operator.capture.comparison.regression import AGAINST_VARIABLE, regression_status, with_regression
from specdecode_operator.capture.files.summary import MESSAGE_BYTES
from specdecode_operator.capture.job_status import read_regression, read_summary
from tests.support.captures import capture_pod, ended
from tests.support.compared_captures import rewrite
from tests.support.unchanged_pairs import ServedEngine, published, with_step_time

WORKLOAD = {"phases": [{"name": "closed-1"}]}
ARM = Path("default/golden/as-deployed/1")
ZERO = {"bytes": 1, "lines": 1, "sha256": "0" * 64}
SLOWER = with_step_time(1.05)
TOLD = '{"capture": "golden", "folder": "default/golden", "limits": {"goodput": %d, "step_time": %d, "latency": 60}}'


@pytest.fixture
def volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The volume of the golden capture, with its files."""
    published(ServedEngine().serve(tmp_path / "golden" / ARM, 1, requests=240), WORKLOAD)
    monkeypatch.setattr(regression, "AGAINST_MOUNT", str(tmp_path / "golden"))
    return tmp_path / "golden"


def _judged(folder: Path, limits: tuple[int, int] = (5, 5)) -> RegressionStatus:
    status = regression_status({AGAINST_VARIABLE: TOLD % limits}, folder)
    return RegressionStatus.parse(status)


def _new(tmp_path: Path, engine: ServedEngine = SLOWER, seed: int = 0, **workload: Any) -> Path:
    folder = tmp_path / "new" / "default" / "new" / "as-deployed" / "1"
    return published(engine.serve(folder, 2, requests=240), {**WORKLOAD, **workload}, seed).parent


def test_a_capture_that_is_held_against_none_judges_nothing() -> None:
    assert regression_status({}, Path("nowhere")) is None
    assert with_regression(b"{}", None) == b"{}"


def test_what_is_worse_is_told_with_its_figures_first(volume: Path, tmp_path: Path) -> None:
    found = _judged(_new(tmp_path))
    assert (found.against, found.verdict) == ("golden", Regressed.REGRESSED)
    assert found.figures[0].verdict is Regressed.REGRESSED
    assert found.figures[-1].verdict is not Regressed.REGRESSED
    slow = next(each for each in found.figures if each.name == "step time with 1 running")
    assert (slow.golden[:4], slow.found[:3], slow.change[:2]) == ("10.5", "11.", "+5")


def test_the_limits_are_those_of_the_object(volume: Path, tmp_path: Path) -> None:
    assert _judged(_new(tmp_path), (40, 40)).verdict is Regressed.HOLDS


def test_files_of_another_workload_or_seed_are_refused(volume: Path, tmp_path: Path) -> None:
    for name, folder in (
        ("workload", _new(tmp_path / "a", ServedEngine(), phases=[])),
        ("seed", _new(tmp_path / "b", ServedEngine(), 7)),
    ):
        found = _judged(folder)
        assert found.verdict is Regressed.NOT_COMPARABLE
        assert f"was made with another {name}: take a new golden capture" in found.message


def test_golden_files_that_were_changed_or_are_gone_are_refused(volume: Path, tmp_path: Path) -> None:
    new = _new(tmp_path, ServedEngine())
    with (volume / ARM / "trace.jsonl").open("a") as trace:
        trace.write("\n")
    changed = _judged(new)
    assert changed.verdict is Regressed.NOT_COMPARABLE
    assert "trace.jsonl has" in changed.message
    assert changed.message.endswith("the golden capture was changed: take it anew")
    for file in (volume / ARM).iterdir():
        file.unlink()
    assert "holds no capture" in _judged(new).message


def test_whatever_goes_wrong_the_capture_itself_has_succeeded(
    volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: Any) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(regression, "judge", breaks)
    found = _judged(_new(tmp_path, ServedEngine()))
    assert found.verdict is Regressed.NOT_COMPARABLE
    assert found.message == "it could not be judged: ZeroDivisionError: oops"


def test_the_message_fits_whatever_is_in_it() -> None:
    figure = {"name": "n" * 90, "golden": "1" * 60, "found": "2" * 60, "change": "3" * 60, "verdict": "Regressed"}
    regression = {"against": "g" * 200, "verdict": "Regressed", "message": "m" * 1000, "figures": [figure] * 12}
    summary = {
        "requests": {"sent": 8, "completed": 8},
        "files": [{"name": "trace.jsonl", "bytes": 12, "lines": 9, "sha256": "0" * 64}] * 8,
        "path": "p" * 300,
    }
    message = with_regression(msgspec.json.encode(summary), regression)
    assert len(message) <= MESSAGE_BYTES
    pod = capture_pod(containerStatuses=[ended("load", 0, msgspec.json.decode(message))])
    kept, judged = read_summary(pod), read_regression(pod)
    assert kept is not None
    assert judged is not None
    assert (kept.requests.sent, kept.path, kept.files) == (8, "p" * 300, None)
    assert 0 < len(judged.figures) < 12


@pytest.mark.parametrize("letter", ["\U0001f40c", "\x1b"])
def test_the_message_fits_in_any_letters(letter: str) -> None:
    regression = {"against": "golden", "verdict": "NotComparable", "message": letter * 1000}
    message = with_regression(b'{"requests": {"sent": 8, "completed": 8}}', regression)
    assert len(message) <= MESSAGE_BYTES
    judged = read_regression(capture_pod(containerStatuses=[ended("load", 0, msgspec.json.decode(message))]))
    assert judged is not None
    assert judged.message.startswith(letter)


def test_golden_files_may_not_have_a_device_read_for_ever(volume: Path, tmp_path: Path) -> None:
    new = _new(tmp_path, ServedEngine())
    rewrite(volume / ARM / "manifest.json", lambda each: {**each, "files": each["files"] | {"../zero": ZERO}})
    assert "../zero in manifest.json is no name of a file" in _judged(new).message
    (volume / ARM / "zero").symlink_to("/dev/zero")
    rewrite(volume / ARM / "manifest.json", lambda each: {**each, "files": {"zero": ZERO}})
    assert "zero is no file" in _judged(new).message
