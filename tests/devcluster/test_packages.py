"""Packages of the machine, installed while others install."""

import fcntl
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from devcluster.host import packages
from tests.support.waiting import eventually

pytestmark = pytest.mark.skipif(not packages.which("apt-get"), reason="a machine without apt")


def test_another_apt_at_work_is_waited_for(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "partial").mkdir()
    nothing = [f"Dir::State::lists={tmp_path}", "Dir::Etc::sourcelist=/dev/null", "Dir::Etc::sourceparts=/dev/null"]
    with ThreadPoolExecutor() as pool:
        with (tmp_path / "lock").open("w") as held:
            fcntl.lockf(held, fcntl.LOCK_EX)
            update = pool.submit(packages.apt_get, "update", *(f"--option={option}" for option in nothing))
            eventually(lambda: update.done() or "another apt" in "".join(capfd.readouterr()), "apt to wait")
            assert not update.done()
        update.result()
