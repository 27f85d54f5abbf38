"""Daemons are found by what their environment says."""

import os
import signal
from pathlib import Path

import pytest

from devcluster.host import processes


def test_a_daemon_is_found_also_while_it_becomes_another_program(tmp_path: Path) -> None:
    """In the middle of exec the kernel shows no environment: this one is there again and again."""
    script = tmp_path / "again.sh"
    script.write_text('#!/bin/sh\nexec "$0"\n')
    script.chmod(0o755)
    state = tmp_path / "state"
    pid = processes.start(state, "again", [str(script)], tmp_path / "log")
    try:
        assert [processes.find(state, "again") for _ in range(200)] == [pid] * 200
        assert [processes.marked(state) for _ in range(200)] == [{pid}] * 200
    finally:
        os.kill(pid, signal.SIGKILL)


def test_what_has_ended_is_not_found(tmp_path: Path) -> None:
    pid = processes.start(tmp_path, "short", ["/bin/true"], tmp_path / "log")
    while processes.alive(pid):
        pass
    assert processes.find(tmp_path, "short") is None


def test_daemons_in_go_are_set_as_the_caller_is_and_as_usual_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOGC", "100")
    monkeypatch.delenv("GOMEMLIMIT", raising=False)
    pid = processes.start(tmp_path, "env", ["/usr/bin/env"], tmp_path / "log")
    while processes.alive(pid):
        pass
    said = (tmp_path / "log").read_text().splitlines()
    assert {"GOGC=100", f"GOMEMLIMIT={processes.GO_SETTINGS['GOMEMLIMIT']}"} <= set(said)
