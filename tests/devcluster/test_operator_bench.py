"""`./just bench-operator` with a handful of objects: every row is there, counts agree, and nothing is left behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from devcluster.cluster.cluster import Cluster, existing
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root"),
]

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "bench.operator.scale"]
OBJECTS = 5


def left_of(bench: int) -> list[str]:
    return [cluster.name for cluster in existing() if cluster.name == f"bench-operator-{bench}"]


def test_a_handful_of_objects_gives_every_row_and_leaves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [*COMMAND, f"--objects={OBJECTS}", "--idle=31", f"--json={file}"]
    with subprocess.Popen(command, cwd=ROOT) as bench:
        assert bench.wait(timeout=1200) == 0
    assert left_of(bench.pid) == []
    (run,) = json.loads(file.read_text())["runs"]
    rows = {row["name"].removeprefix(f"{OBJECTS} objects: "): row for row in run["figures"]}
    values = {name: row["value"] for name, row in rows.items()}

    assert f"{OBJECTS} are Ready" in rows["create, until all are Ready"]["remark"], "every engine is asked, and answers"
    assert rows["create, until all children are there"]["against"]["value"] > 0
    service = rows["API server alone, a Service with an address"]
    assert service["value"] > 0
    assert service["against"]["value"] > 0
    assert values["CPU time until all is at rest"] > values["CPU time for it"] > 0
    assert "1.00 patch services" in rows["API calls"]["remark"]
    assert values["API calls"] > values["status writes"] >= 1
    assert values["bytes to and from the API server"] > 10, "a plan alone has more"
    assert values["reconcile P99, idle"] < values["reconcile P99, create to Ready"] * 100
    looks = int(rows["reconcile P99, idle"]["remark"].split("; ")[1].split(" ")[0])
    assert looks >= 2 * OBJECTS, "everything is looked at each 15 s"
    assert values["memory at most, all Ready"] >= values["memory, all Ready"] > 50
    assert values["one change amid them, median of 5"] > 0
    assert values["restart, until 3 changes are acted on"] > 0
    assert values["update of all, until all workloads have it"] > 0
    assert values["delete of all, until no child is left"] > 0


def test_an_interrupt_takes_the_cluster_down() -> None:
    with subprocess.Popen([*COMMAND, "--objects=1"], cwd=ROOT) as bench:
        try:
            (name,) = eventually(lambda: left_of(bench.pid), "its cluster is there")
            eventually((Cluster(name).kubeconfig).exists, "it is being made")
        finally:
            bench.send_signal(signal.SIGINT)
            assert bench.wait(timeout=120) != 0
    assert left_of(bench.pid) == []
