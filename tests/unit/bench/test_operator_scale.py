"""The parts of `./just bench-operator` that need no cluster: counts, quantiles and rows."""

import json
from collections import Counter
from pathlib import Path

import pytest

from bench.operator import histogram, scale
from bench.operator.audit_counts import STATUS_WRITE, AuditCounts, about_objects, writes
from bench.operator.life import CHILDREN, DELETE, IDLE, RESTART, SETTLED, UPDATE, Life
from bench.operator.phases import Cost
from bench.operator.process_use import Memory
from bench.operator.slowest import Look, looks, slowest_tenth
from specdecode_operator.api.deployment import Key
from specdecode_operator.cluster.client import Wait, Waits
from specdecode_operator.handlers.metrics import told
from tests.support.operator_process import USER

PAGE = """
# TYPE specdecode_reconcile_duration_seconds histogram
specdecode_reconcile_duration_seconds_bucket{kind="SpecDecodeDeployment",outcome="done",le="0.1"} 50
specdecode_reconcile_duration_seconds_bucket{kind="SpecDecodeDeployment",outcome="done",le="1.0"} 90
specdecode_reconcile_duration_seconds_bucket{kind="SpecDecodeDeployment",outcome="done",le="+Inf"} 100
specdecode_reconcile_duration_seconds_bucket{kind="SpecDecodeDeployment",outcome="failed",le="0.1"} 0
specdecode_reconcile_duration_seconds_bucket{kind="SpecDecodeDeployment",outcome="failed",le="1.0"} 10
specdecode_reconcile_duration_seconds_bucket{kind="SpecDecodeDeployment",outcome="failed",le="+Inf"} 10
specdecode_reconcile_duration_seconds_bucket{kind="SpecDecodeCapture",outcome="done",le="0.1"} 7
specdecode_reconcile_duration_seconds_bucket{kind="SpecDecodeCapture",outcome="done",le="1.0"} 7
specdecode_reconcile_duration_seconds_bucket{kind="SpecDecodeCapture",outcome="done",le="+Inf"} 7
"""


def observed() -> dict[float, float]:
    return histogram.buckets(PAGE, "specdecode_reconcile_duration_seconds", {"kind": "SpecDecodeDeployment"})


def test_buckets_of_all_outcomes_are_merged_into_one_histogram() -> None:
    assert observed() == {0.1: 50, 1.0: 100, float("inf"): 110}


@pytest.mark.parametrize(
    ("share", "expected"), [(0.25, 0.055), (50 / 110, 0.1), (75 / 110, 0.55), (100 / 110, 1.0), (0.99, 1.0)]
)
def test_quantile_is_interpolated_within_its_bucket_as_in_prometheus(share: float, expected: float) -> None:
    assert histogram.quantile(observed(), share) == pytest.approx(expected)


def line(verb: str, resource: str, stage: str = "ResponseComplete", user: str = USER, subresource: str = "") -> bytes:
    about = {"resource": resource} | ({"subresource": subresource} if subresource else {})
    event = {"verb": verb, "stage": stage, "user": {"username": user}, "objectRef": about}
    event |= {
        "requestReceivedTimestamp": "2026-11-23T15:00:00.000000Z",
        "stageTimestamp": f"2026-11-23T15:0{9 if verb == 'watch' else 0}:00.250000Z",
    }
    return json.dumps(event, separators=(",", ":")).encode() + b"\n"


def test_audit_calls_are_counted_once_across_log_rotation(tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"
    counts = AuditCounts(file, USER)
    assert counts.read() == Counter(), "the API server has written nothing yet"

    half = line("patch", "services")
    file.write_bytes(
        line("watch", "pods", "ResponseStarted") + line("watch", "pods") + line("get", "pods", user="lws") + half[:20]
    )
    assert counts.read() == {"watch pods": 1}
    with file.open("ab") as log:
        log.write(half[20:] + line("patch", "specdecodedeployments", subresource="status"))
    assert counts.read() == {"watch pods": 1, "patch services": 1, STATUS_WRITE: 1}

    with file.open("ab") as log:
        log.write(line("patch", "leases"))
    file.rename(tmp_path / "audit-1.jsonl")
    file.write_bytes(line("patch", "services"))
    found = counts.read()
    assert found == {"watch pods": 1, "patch services": 2, STATUS_WRITE: 1, "patch leases": 1}
    assert about_objects(found).total() == 4, "Leases do not count"
    assert writes(found) == 3
    assert counts.server_s == 0.75, "of three calls, without the watch"
    counts.close()


def test_reconcile_log_lines_are_parsed() -> None:
    waits = Waits(Wait(6, 0.25), Wait(1, 0.125))
    lines = [told(Key("team", "llama"), outcome, 0.5, waits) for outcome in ("done", "failed")]
    assert looks("\n".join(lines)) == [Look(0.5, 0.25, 6, 0.125)]
    assert slowest_tenth(looks("\n".join(lines))) is None


def life(objects: int, seconds: float) -> Life:
    buckets = {0.1: 90.0, 1.0: 100.0, float("inf"): 100.0}
    calls = Counter({"patch services": objects, STATUS_WRITE: 3 * objects, "patch leases": 50})
    looks = [Look(0.1, 0.05, 1, 0.0)] * 18 + [Look(2.0, 1.0, 5, 0.5)] * 2
    cost = Cost(seconds, seconds / 2, calls, 5000 * objects, 10 * objects, buckets, 0.04 * objects, looks, seconds / 4)
    still = Cost(60.0, 0.6, Counter(), 0, 0, buckets, 0.0, [], 0.0)
    costs = dict.fromkeys((CHILDREN, SETTLED, RESTART, UPDATE, DELETE), cost) | {IDLE: still}
    used = Memory(100_000_000, 300_000_000)
    return Life(
        objects,
        60.0,
        costs,
        reactions_s=[0.1, 0.3, 0.2],
        restart_s=4.0,
        service_s=(0.02, 0.005),
        look_interval_s=105.0,
        ready=objects,
        ready_s=seconds + 1,
        memory={SETTLED: used, RESTART: used},
    )


def test_rows_compare_the_operator_with_its_peer_and_show_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "_lives", lambda n, *_, **__: (life(n, n / 10), life(n, n / 20)))
    monkeypatch.setattr(scale, "OBJECTS", (100, 200))
    rows = {figure.name: figure for figure in scale.figures_of_sizes((100, 200), 60.0)}

    create = rows["100 objects: create, until all children are there"]
    assert create.against is not None
    assert (create.value, create.against.value) == (10.0, 5.0)
    assert "other processes used 0.2 cores, 0.2 during the turn of the peer" in create.remark
    ratio = rows["100 objects: create, times the peer's"]
    assert ratio.against is not None
    assert ratio.value == 2.0
    assert ratio.against.holds(2.0) is False, "our aim is to be no slower"
    assert rows["200 objects: API calls"].value == 4.0
    assert rows["200 objects: status writes"].value == 3.0
    assert rows["200 objects: bytes to and from the API server"].value == 5.0
    assert rows["200 objects: idle CPU"].value == pytest.approx(1.0)
    assert "every 105 s" in rows["200 objects: idle CPU"].remark
    assert rows["200 objects: one change amid them, median of 3"].value == 200.0
    assert "worst 300" in rows["200 objects: one change amid them, median of 3"].remark
    assert rows["200 objects: reconcile P99, update"].value == pytest.approx(910.0)
    service = rows["200 objects: API server alone, a Service with an address"]
    assert (service.value, service.remark) == (20.0, "allocated one at a time: at least 4.0 s of the creation")
    slow = rows["200 objects: slowest tenth of reconciles, update: from"]
    assert slow.value == 2000.0
    assert slow.remark == (
        "50% for 5.0 calls of the API server (other reconciles: 1.0) of 200 ms, of which the server worked 10 ms;"
        " 25% for engines"
    )
    assert rows["create, until all children are there: growth"].value == pytest.approx(1.0)
    assert rows["memory: growth"].value == pytest.approx(0.0)
