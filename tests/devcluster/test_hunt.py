"""The hunt finds nothing in the operator as it is, and a fault that is put into it."""

import os
from collections.abc import Iterator

import pytest

from devcluster.cluster.cluster import Cluster
from hunt.__main__ import main

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root"),
]

TAKES_ENGINES_AWAY = 16
"""Of the seeded faults: a refused spec ends the engines that serve."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    name = f"test-hunt-{os.getpid()}"
    yield name
    Cluster(name).down()


def test_a_tour_finds_nothing(cluster: str, tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["hunt", "--name", cluster, "--minutes=1", "--finding", str(tmp_path / "finding.yaml")])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert "nothing was found" in printed
    assert "kill-at-call" in printed


def test_a_seeded_fault_is_found_and_missed_without_its_oracle(
    cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["hunt", "--name", cluster, "--seeded", f"--fault={TAKES_ENGINES_AWAY}"]
    assert main(options) == 0
    printed = capsys.readouterr().out
    assert "found  a refused spec takes the engines away: " in printed
    oracles = printed.partition("takes the engines away: ")[2].splitlines()[0].split(", ")
    assert main([*options, *(f"--without={oracle}" for oracle in oracles)]) == 1
    assert "MISSED a refused spec takes the engines away" in capsys.readouterr().out


def test_a_soak_ends_with_all_invariants(cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["soak", "--name", cluster, "--minutes=2", "--objects=4"])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert "all invariants hold" in printed
    assert "slope" in printed
