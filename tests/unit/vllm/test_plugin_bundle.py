"""The recorder as a plugin of an unmodified vLLM, which a zip file on PYTHONPATH provides."""

import importlib.metadata
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from specdecode_operator.vllm.plugin_bundle import RECORDER

SHOW = """\
import importlib.metadata, json, os, sys
import specdecode_recorder
(plugin,) = importlib.metadata.entry_points(name="specdecode_recorder")
print(json.dumps([plugin.name, specdecode_recorder.__path__[0], os.environ.get("VLLM_PLUGINS"), sys.argv[1:]]))
"""


def test_recorder_zip_is_reproducible(tmp_path: Path) -> None:
    assert RECORDER.zipped() == RECORDER.zipped()
    (tmp_path / "recorder.zip").write_bytes(RECORDER.zipped())
    with zipfile.ZipFile(tmp_path / "recorder.zip") as archive:
        found = {name: archive.read(name).decode() for name in archive.namelist()}
        program = found.pop("__main__.py")
        assert "specdecode_recorder.sidecar" in program
        assert found == {"specdecode_recorder/__init__.py": "", **RECORDER.files()}
        assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}


@pytest.mark.parametrize(
    ("before", "after"), [(None, None), ("", "specdecode_recorder"), ("lora", "lora,specdecode_recorder")]
)
def test_command_finds_the_plugin_in_the_zip_file(tmp_path: Path, before: str | None, after: str | None) -> None:
    """If VLLM_PLUGINS is set, even to nothing, vLLM loads only the plugins that it names."""
    place = tmp_path / "recorder.zip"
    place.write_bytes(RECORDER.zipped())
    command = RECORDER.loaded_by([sys.executable, "-c", SHOW, "$HOME", "two words"], str(place))
    env = {"PYTHONPATH": str(tmp_path)} | ({} if before is None else {"VLLM_PLUGINS": before})
    said = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=300).stdout
    assert json.loads(said) == [
        "specdecode_recorder",
        f"{place}/specdecode_recorder",
        after,
        ["$HOME", "two words"],
    ]


def test_command_runs_without_the_zip_file(tmp_path: Path) -> None:
    command = RECORDER.loaded_by([sys.executable, "-c", "print('serves')"], str(tmp_path / "absent.zip"))
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout == "serves\n"


def test_distribution_has_one_plugin(tmp_path: Path) -> None:
    (tmp_path / "recorder.zip").write_bytes(RECORDER.zipped())
    (distribution,) = importlib.metadata.distributions(path=[str(tmp_path / "recorder.zip")])
    assert [entry.group for entry in distribution.entry_points] == ["vllm.stat_logger_plugins"]
