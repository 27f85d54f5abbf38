"""What a first run does before its cluster starts."""

import threading

import pytest

from devcluster import install
from devcluster.host import packages, progress
from devcluster.host.errors import ClusterError


def test_programs_are_built_while_images_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=60)
    monkeypatch.setattr(packages, "ensure", lambda _programs: None)
    monkeypatch.setattr(install, "build_programs", both.wait)
    monkeypatch.setattr(install, "prepare_images", both.wait)
    install.prepare()


def test_a_failed_build_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ClusterError("no Go module index")

    monkeypatch.setattr(packages, "ensure", lambda _programs: None)
    monkeypatch.setattr(install, "build_programs", fail)
    monkeypatch.setattr(install, "prepare_images", lambda: None)
    with pytest.raises(ClusterError, match="no Go module index"):
        install.prepare()


def test_a_step_that_ends_after_another_has_begun_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    with progress.step("building programs"), progress.step("making images"):
        pass
    assert capsys.readouterr().err.splitlines() == [
        "building programs …",
        "making images …",
        "  done in 0 s",
        "building programs: done in 0 s",
    ]
