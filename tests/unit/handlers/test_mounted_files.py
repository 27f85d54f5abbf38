"""Follow mounted facts and calibration files, and keep the last good content."""

import asyncio
import json
import logging
import os
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from specdecode_operator.deployment.models.checkpoint_reader import Checkpoint
from specdecode_operator.handlers import mounted_files
from specdecode_operator.handlers.mounted_files import CalibrationFile, FactsFolder, read_facts_file
from specdecode_operator.sizing.calibration import Calibration, serialize_calibration
from tests.support.facts_files import TINY_BYTES, facts_text, write_facts
from tests.support.objects import TINY_CONFIG
from tests.unit.sizing.test_calibration import ENTRY


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "facts"


@pytest.fixture
def folder(path: Path) -> FactsFolder:
    return FactsFolder(path)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_missing_or_empty_facts_folder_gives_no_facts_and_no_log(
    path: Path, folder: FactsFolder, caplog: pytest.LogCaptureFixture
) -> None:
    assert FactsFolder().read() == {}
    assert folder.read() == {}
    path.mkdir()
    assert folder.read() == {}
    assert not caplog.records


def test_added_changed_and_removed_facts_files_are_followed(
    path: Path, folder: FactsFolder, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    file = write_facts(path, "tiny.json", "site/tiny")
    first = folder.read()["site/tiny"]
    assert (first.file, first.checkpoint.config) == ("tiny.json", TINY_CONFIG)
    assert folder.read()["site/tiny"] == first
    write_facts(path, "other.json", "/mnt/other/")
    assert set(folder.read()) == {"site/tiny", "mnt/other"}, "a path counts however it is written"
    write_facts(path, "tiny.json", "site/tiny", {**TINY_CONFIG, "num_hidden_layers": 3})
    changed = folder.read()["site/tiny"]
    assert changed != first
    assert changed.checkpoint.config["num_hidden_layers"] == 3
    file.unlink()
    assert [set(folder.read()) for _ in range(3)] == [{"mnt/other"}] * 3
    assert [record.levelname for record in caplog.records] == ["INFO"] * 4, "each change is logged once"


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ("", "holds no facts"),
        ("{", "not valid JSON"),
        ("[1]", "holds no facts"),
        ("a: [b", "broken.json"),
        ('{"kind": "ModelFacts"}', "is not a facts file"),
        (json.dumps({**json.loads(facts_text("a/b")), "weights": 7}), "config or weights"),
        (facts_text("a/b", weights_bytes=2**60), f"weights.total_bytes: {2**60:,}"),
        (facts_text("a/b", weights_bytes=TINY_BYTES * 100), "weights: 0.5"),
        (facts_text("a/b", weights_bytes=TINY_BYTES * 3), "weights: 0.0"),
        (facts_text("a/b", weights_bytes=TINY_BYTES // 3), "weights: 0.0"),
        (facts_text("a/b", {**TINY_CONFIG, "num_hidden_layers": -1}), "config.num_hidden_layers"),
        (facts_text("a/b", {**TINY_CONFIG, "architectures": 7}), "config.architectures"),
        (facts_text("a/b") + facts_text("a/b"), "document 2: model: a/b"),
        ("kind: \udcff", "UTF-8"),
        (yaml.safe_dump({**json.loads(facts_text("a/b")), "config": {**TINY_CONFIG, 1: 2}}), "broken.json"),
    ],
)
def test_broken_facts_file_is_logged_once_and_others_are_read(
    path: Path, folder: FactsFolder, caplog: pytest.LogCaptureFixture, broken: str, told: str
) -> None:
    write_facts(path, "tiny.json", "site/tiny")
    (path / "broken.json").write_text(broken, errors="surrogateescape")
    assert [set(folder.read()) for _ in range(3)] == [{"site/tiny"}] * 3
    write_facts(path, "more.json", "site/more")
    assert set(folder.read()) == {"site/tiny", "site/more"}
    (warning,) = warnings(caplog)
    assert f"broken.json in {path}" in warning
    assert told in warning
    assert len(warning) < 600


def test_last_good_facts_stay_until_the_broken_file_is_removed(
    path: Path, folder: FactsFolder, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_facts(path, "tiny.json", "site/tiny")
    good = folder.read()["site/tiny"]
    file.write_text("{")
    assert [folder.read()["site/tiny"] for _ in range(2)] == [good, good]
    (warning,) = warnings(caplog)
    assert "stay in force" in warning
    file.unlink()
    assert folder.read() == {}


def test_catalogue_then_first_file_take_precedence_for_a_model(
    path: Path, folder: FactsFolder, caplog: pytest.LogCaptureFixture
) -> None:
    write_facts(path, "a.json", "site/tiny")
    write_facts(path, "b.json", "/site/tiny/")
    write_facts(path, "c.json", "meta-llama/Llama-3.1-8B-Instruct")
    assert {model: facts.file for model, facts in folder.read().items()} == {"site/tiny": "a.json"}
    twice, known = warnings(caplog)
    assert f"b.json in {path}: model: /site/tiny/: a.json has facts" in twice
    assert f"c.json in {path}: model: meta-llama/Llama-3.1-8B-Instruct: the catalogue" in known


def test_number_and_size_of_facts_files_are_limited(
    path: Path, folder: FactsFolder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounted_files, "MOST_FILES", 2)
    monkeypatch.setattr(mounted_files, "MOST_FILE_BYTES", 2_000)
    write_facts(path, "a.json", "site/a")
    (path / "b.json").write_text(facts_text("site/b") + " " * 2_000)
    write_facts(path, "c.json", "site/c")
    assert set(folder.read()) == {"site/a"}
    large, many = warnings(caplog)
    assert f"b.json in {path}: 2," in large
    assert "3 files; only the first 2" in many


def test_file_rewritten_in_place_is_read_again(path: Path, folder: FactsFolder) -> None:
    file = write_facts(path, "tiny.json", "site/tiny")
    folder.read()
    file.write_text(facts_text("site/tidy"))
    os.utime(file, (0, 0))
    assert set(folder.read()) == {"site/tidy"}, "neither inode nor size have changed"


def test_second_thread_waits_until_all_facts_are_read(path: Path) -> None:
    """The admission webhook must not judge by half of the facts."""
    reads, goes_on = threading.Event(), threading.Event()

    def read(file: Path) -> dict[str, Checkpoint]:
        reads.set()
        assert goes_on.wait(60)
        return dict(read_facts_file(file))

    write_facts(path, "tiny.json", "site/tiny")
    folder = FactsFolder(path, read)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(folder.read)
        assert reads.wait(60)
        second = threads.submit(folder.read)
        goes_on.set()
        assert set(first.result(60)) == set(second.result(60)) == {"site/tiny"}


async def test_reconciles_at_a_start_wait_for_the_first_read(path: Path) -> None:
    write_facts(path, "tiny.json", "site/tiny")
    begun, go_on = threading.Event(), threading.Event()

    def read(file: Path) -> Mapping[str, Checkpoint]:
        begun.set()
        assert go_on.wait(60)
        return read_facts_file(file)

    folder = FactsFolder(path, read)
    cancelled = asyncio.create_task(folder.look())
    await asyncio.to_thread(begun.wait, 60)
    waiting = asyncio.create_task(folder.look())
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    go_on.set()
    await waiting
    assert "site/tiny" in folder.known


def test_config_map_update_through_symlinks_is_followed(path: Path, folder: FactsFolder) -> None:
    """Kubelet writes a new folder and swaps one link."""
    path.mkdir()
    for number in range(2):
        write_facts(path / f"..v{number}", "tiny.json", f"site/v{number}")
    (path / "..data").symlink_to("..v0")
    (path / "tiny.json").symlink_to("..data/tiny.json")
    assert set(folder.read()) == {"site/v0"}
    (path / "..new").symlink_to("..v1")
    (path / "..new").rename(path / "..data")
    assert set(folder.read()) == {"site/v1"}


OTHER = replace(ENTRY, tensor=4)


@pytest.fixture
def calibration(tmp_path: Path) -> Path:
    return tmp_path / "calibration.json"


def write(calibration: Path, *entries: object) -> None:
    calibration.write_text(serialize_calibration(Calibration(entries)))  # type: ignore[arg-type]


def test_broken_calibration_file_is_logged_once_and_last_good_stays(
    calibration: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = CalibrationFile(calibration)
    write(calibration, ENTRY)
    file.read()
    calibration.write_text('{"format": 7}')
    assert [file.read().entries for _ in range(3)] == [(ENTRY,)] * 3
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert str(calibration) in warning
    assert "format" in warning
    calibration.write_bytes(b"\xff\xfe")
    assert [file.read().entries for _ in range(3)] == [(ENTRY,)] * 3
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 2
    write(calibration, OTHER)
    assert file.read().entries == (OTHER,), "a file that was mended counts again"
