"""The operator's calibration file: it may be absent, come, change, break and go."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from specdecode_operator.handlers.mounted_files import CalibrationFile
from specdecode_operator.sizing.calibration import UNCALIBRATED, Calibration, serialize_calibration
from tests.unit.sizing.test_calibration import ENTRY

OTHER = replace(ENTRY, tensor=4)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "calibration.json"


def write(path: Path, *entries: object) -> None:
    path.write_text(serialize_calibration(Calibration(entries)))  # type: ignore[arg-type]


def test_without_a_file_nothing_is_corrected(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert CalibrationFile().read() is UNCALIBRATED
    assert CalibrationFile(path).read() == UNCALIBRATED
    assert not caplog.records, "an optional file that is not there is nothing to tell"


def test_it_is_followed_as_it_comes_changes_and_goes(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    file = CalibrationFile(path)
    assert file.read() == UNCALIBRATED
    write(path, ENTRY)
    assert [file.read().entries for _ in range(3)] == [(ENTRY,)] * 3
    write(path, ENTRY, OTHER)
    assert file.read().entries == (ENTRY, OTHER)
    path.unlink()
    assert [file.read() for _ in range(3)] == [UNCALIBRATED] * 3
    assert [record.levelname for record in caplog.records] == ["INFO"] * 3, "each change is told once"


def test_a_broken_file_is_told_once_and_the_last_good_one_stays(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = CalibrationFile(path)
    write(path, ENTRY)
    file.read()
    path.write_text('{"format": 7}')
    assert [file.read().entries for _ in range(3)] == [(ENTRY,)] * 3
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert str(path) in warning
    assert "format" in warning
    path.write_bytes(b"\xff\xfe")
    assert [file.read().entries for _ in range(3)] == [(ENTRY,)] * 3
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 2
    write(path, OTHER)
    assert file.read().entries == (OTHER,), "a file that was mended counts again"


def test_a_configmap_is_followed_through_its_links(path: Path) -> None:
    """Kubelet writes a new folder and swaps one link."""
    folder = path.parent
    for number, entry in enumerate((ENTRY, OTHER)):
        (folder / f"v{number}").mkdir()
        write(folder / f"v{number}" / path.name, entry)
    (folder / "..data").symlink_to("v0")
    path.symlink_to(f"..data/{path.name}")
    file = CalibrationFile(path)
    assert file.read().entries == (ENTRY,)
    (folder / "..new").symlink_to("v1")
    (folder / "..new").rename(folder / "..data")
    assert file.read().entries == (OTHER,)
