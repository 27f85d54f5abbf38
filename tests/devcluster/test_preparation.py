"""What a first run does before its cluster starts."""

import threading

import pytest

from devcluster import install
from devcluster.host import progress
from devcluster.host.errors import ClusterError
from devcluster.host.threads import together


def test_the_first_error_is_raised_before_other_work_ends() -> None:
    end = threading.Event()

    def fail() -> None:
        raise ClusterError("no Go module index")

    try:
        with pytest.raises(ClusterError, match="no Go module index"):
            together(lambda: end.wait(60), fail)
        assert not end.is_set()
    finally:
        end.set()


def test_programs_are_built_while_images_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=60)
    monkeypatch.setattr(install, "check_rights", lambda _nodes: None)
    monkeypatch.setattr(install, "build_programs", both.wait)
    monkeypatch.setattr(install, "prepare_images", both.wait)
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
