"""Processes of pods are found by their control groups, which come and go with the pods."""

import threading
from pathlib import Path

import pytest

from devcluster.host import cgroups


def test_pods_that_end_meanwhile_disturb_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "_ROOT", tmp_path)
    cluster = tmp_path / "memory" / "demo"
    stays, goes = cluster / "stays", cluster / "kubepods" / "pod" / "container"
    stays.mkdir(parents=True)
    (stays / "cgroup.procs").write_text("7\n")
    enough = threading.Event()

    def come_and_go() -> None:
        while not enough.is_set():
            goes.mkdir(parents=True)
            goes.rmdir()
            goes.parent.rmdir()

    pods = threading.Thread(target=come_and_go)
    pods.start()
    try:
        assert [cgroups.pids("demo") for _ in range(2000)] == [{7}] * 2000
    finally:
        enough.set()
        pods.join()
