"""Files that outlive their capture are fetched too, and what just fits on the disk is."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import Result

from tests.unit.cli.capture.conftest import CONTENT, Cluster, content, published


def test_a_capture_that_is_gone_is_found_by_its_claim(
    cluster: Cluster, run: Callable[..., Result], tmp_path: Path
) -> None:
    cluster.publish()
    cluster.holds()
    result = run("fetch", "demo", tmp_path / "out", "--image", "operator:1")
    assert result.exit_code == 0, result.output
    assert "of claim demo-capture" in result.output
    assert content(tmp_path / "out")["trace.jsonl"] == CONTENT


def test_a_disk_takes_what_it_has_room_for(
    cluster: Cluster, run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.publish()
    cluster.holds(published())
    usage = SimpleNamespace(free=len(CONTENT) - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    refused = run("fetch", "demo", tmp_path / "out")
    assert refused.exit_code == 1
    assert "name a folder with more room" in refused.output
    usage.free += 1
    assert run("fetch", "demo", tmp_path / "out").exit_code == 0
