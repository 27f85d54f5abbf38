"""Snapshots of settled objects that one process leaves for the next."""

import base64
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from specdecode_operator.api.deployment import Key
from specdecode_operator.cluster.client import Cluster
from specdecode_operator.cluster.observed_figures import Prometheus
from specdecode_operator.cluster.resources import (
    CONFIG_MAP,
    OWNED_SELECTOR,
    POD,
    SERVICE,
    SPECDECODE_CAPTURE,
    SPECDECODE_DEPLOYMENT,
)
from specdecode_operator.cluster.rights import RELEASE, Scope, permissions
from specdecode_operator.deployment.attestation.keys import SigningKey
from specdecode_operator.handlers.leadership import LeaseName
from specdecode_operator.handlers.main import OperatorState
from specdecode_operator.handlers.mounted_files import CalibrationFile, FactsFolder
from specdecode_operator.handlers.settings import Settings
from specdecode_operator.handlers.snapshot import Snapshot
from specdecode_operator.sizing.calibration import Calibration, serialize_calibration
from tests.support.api_objects import matches
from tests.support.api_server import ApiServer
from tests.support.attestations import key_pair
from tests.support.embedded_operator import until
from tests.support.facts_files import write_facts
from tests.support.objects import tiny_cpu
from tests.unit.deployment.test_speculation_in_force import counting
from tests.unit.handlers.reconciler_world import World
from tests.unit.handlers.resync_rounds import add_node, stop
from tests.unit.handlers.test_metrics import samples
from tests.unit.sizing.test_calibration import ENTRY

LEASE = LeaseName("team", "operator", "operator-1", 15)
LLAMA, OTHER = Key("team", "llama"), Key("team", "other")
STORED = "operator-snapshot"


@pytest.fixture
async def settled_world(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """A cluster whose only object is settled."""
    start_s, passed_s = time.monotonic(), 0.0
    monkeypatch.setattr(time, "monotonic", lambda: start_s + passed_s)
    world.add(tiny_cpu())
    await world.look()
    world.start_engines()
    world.serve()
    for _ in range(3):
        passed_s += 60
        monkeypatch.setattr(world.probe, "read_all", AsyncMock(return_value={"llama-1": counting(600, 600)}))
        await world.look()
    return world


def snapshot(world: World, cluster: Cluster, **settings: Any) -> Snapshot:
    """Return the snapshot as a process sees it that has listed everything."""
    world.restart(**settings)
    world.see()
    for body in world.all(SPECDECODE_CAPTURE):
        world.cache.put_parent(SPECDECODE_CAPTURE.kind, body)
    return Snapshot(cluster, LEASE, world.cache, world.settings)


async def test_settled_objects_are_known_to_the_next_process(settled_world: World, cluster: Cluster) -> None:
    assert settled_world.reconciler.settled() == [LLAMA]
    await snapshot(settled_world, cluster).keep([LLAMA])
    assert await snapshot(settled_world, cluster).settled([LLAMA, OTHER]) == {LLAMA}


async def test_busy_engines_are_settled_and_starting_ones_are_not(
    settled_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = settled_world
    monkeypatch.setattr(world.probe, "read_all", AsyncMock(return_value={"llama-1": counting(900, 900)}))
    await world.look()
    assert world.reconciler.settled() == [LLAMA]
    world.api.change(POD, "llama-1", status={"conditions": []})
    monkeypatch.setattr(world.probe, "read_all", AsyncMock(return_value={}))
    await world.look()
    assert world.reconciler.settled() == []


CHANGES: dict[str, Callable[[World], Any]] = {
    "the object": lambda world: world.api.change(SPECDECODE_DEPLOYMENT, "llama", spec=tiny_cpu(replicas=2)),
    "a child": lambda world: world.api.change(SERVICE, "llama", spec={"clusterIP": "10.0.0.7"}),
    "a missing child": lambda world: world.api.remove(SERVICE, "llama"),
    "a pod": lambda world: world.api.change(POD, "llama-1", status={"conditions": []}),
    "a capture": lambda world: world.api.create(
        SPECDECODE_CAPTURE, {"metadata": {"namespace": "team", "name": "demo"}, "spec": {"deployment": "llama"}}
    ),
    "a node": lambda world: add_node(world.api, "gpu-1"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
async def test_changed_objects_are_not_settled(
    settled_world: World, cluster: Cluster, change: Callable[[World], Any]
) -> None:
    await snapshot(settled_world, cluster).keep([LLAMA])
    change(settled_world)
    assert await snapshot(settled_world, cluster).settled([LLAMA]) == set()


@pytest.mark.parametrize(
    "settings",
    [
        {"host_paths": ("/models",)},
        {"pod_template": frozenset({"hostNetwork"})},
        {"prometheus": Prometheus("http://prometheus")},
        {"signing_key": SigningKey.read(key_pair()[0])},
    ],
    ids=lambda settings: next(iter(settings)),
)
async def test_other_settings_unsettle_all_objects(settled_world: World, cluster: Cluster, settings: Any) -> None:
    await snapshot(settled_world, cluster).keep([LLAMA])
    assert await snapshot(settled_world, cluster, **settings).settled([LLAMA]) == set()


async def test_another_calibration_unsettles_all_objects(
    settled_world: World, cluster: Cluster, tmp_path: Path
) -> None:
    await snapshot(settled_world, cluster).keep([LLAMA])
    (tmp_path / "calibration.json").write_text(serialize_calibration(Calibration((ENTRY,))))
    settled_world.calibration = CalibrationFile(tmp_path / "calibration.json")
    assert await snapshot(settled_world, cluster).settled([LLAMA]) == set()


async def test_unread_calibration_is_not_in_the_snapshot(
    settled_world: World, cluster: Cluster, tmp_path: Path
) -> None:
    """The calibration was written after the last decision."""
    file = tmp_path / "calibration.json"
    settled_world.calibration = CalibrationFile(file)
    last = snapshot(settled_world, cluster)
    file.write_text(serialize_calibration(Calibration((ENTRY,))))
    await last.keep([LLAMA])
    settled_world.calibration = CalibrationFile(file)
    assert await snapshot(settled_world, cluster).settled([LLAMA]) == set()


async def test_mounted_facts_are_read_before_the_comparison(
    settled_world: World, cluster: Cluster, tmp_path: Path
) -> None:
    write_facts(tmp_path, "tiny.json", "site/tiny")
    last = snapshot(settled_world, cluster, facts=FactsFolder(tmp_path))
    settled_world.settings.facts.read()
    await last.keep([LLAMA])
    assert await snapshot(settled_world, cluster, facts=FactsFolder(tmp_path)).settled([LLAMA]) == {LLAMA}
    write_facts(tmp_path, "other.json", "site/other")
    assert await snapshot(settled_world, cluster, facts=FactsFolder(tmp_path)).settled([LLAMA]) == set()


@pytest.mark.parametrize("text", ["", "AAAA", "no base64!", "AAAAAAAAAAA="], ids=["empty", "short", "text", "zeros"])
async def test_invalid_snapshot_settles_nothing(settled_world: World, cluster: Cluster, text: str) -> None:
    await snapshot(settled_world, cluster).keep([LLAMA])
    settled_world.api.change(CONFIG_MAP, STORED, binaryData={"settled": text})
    assert await snapshot(settled_world, cluster).settled([LLAMA]) == set()


async def test_missing_rights_only_cost_the_snapshot(settled_world: World, cluster: Cluster, api: ApiServer) -> None:
    api.refusals |= {"patch configmaps": (403, "no"), "get configmaps": (403, "no")}
    await snapshot(settled_world, cluster).keep([LLAMA])
    assert await snapshot(settled_world, cluster).settled([LLAMA]) == set()
    assert STORED not in api.names(CONFIG_MAP)


async def test_rights_of_the_own_namespace_are_enough(
    settled_world: World, cluster: Cluster, api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.LEASE", replace(LEASE, name=RELEASE))
    api.granted = frozenset(permissions(Scope.OWN))
    for _ in range(2):  # It is created, then changed.
        await snapshot(settled_world, cluster).keep([LLAMA])
        assert await snapshot(settled_world, cluster).settled([LLAMA]) == {LLAMA}


async def test_watched_snapshot_has_no_owner(settled_world: World, cluster: Cluster, api: ApiServer) -> None:
    """The snapshot has the label that watches select on, because operatorGuard requires it."""
    await snapshot(settled_world, cluster).keep([LLAMA])
    stored = api.find(CONFIG_MAP, STORED) or {}
    assert matches(stored, OWNED_SELECTOR)
    state = OperatorState()
    state.cache.put_parent(SPECDECODE_DEPLOYMENT.kind, settled_world.object)
    state.handle("ADDED", {"kind": CONFIG_MAP.kind, **stored})
    assert not state.relist.due, "the event was handled"
    assert not state.queue.is_pending(LLAMA)
    assert state.cache.all_children(LLAMA) == {}
    assert [each for each in await settled_world.look() if STORED in each] == []


async def test_ten_thousand_objects_fit(settled_world: World, cluster: Cluster) -> None:
    keys = [Key("team", f"llama-{number}") for number in range(60_000)]
    await snapshot(settled_world, cluster).keep(keys)
    stored = (settled_world.api.find(CONFIG_MAP, STORED) or {})["binaryData"]["settled"]
    assert len(stored) < 2**20
    assert len(base64.b64decode(stored)) == 8 * 50_000


@pytest.mark.parametrize("is_changed", [False, True], ids=["same inputs", "another calibration"])
async def test_next_process_leaves_out_what_the_last_one_has_settled(
    world: World, engine_port: int, tmp_path: Path, *, is_changed: bool
) -> None:
    file = tmp_path / "calibration.json"
    world.add(tiny_cpu(serving={"maxModelLen": 1024, "port": engine_port}))
    await world.look()
    world.start_engines()
    world.serve()
    first, second = (OperatorState(Settings(lease=LEASE, calibration=CalibrationFile(file))) for _ in range(2))
    await first.start()
    assert first.settled == set()
    for _ in range(3):  # the last one has nothing to write
        first.queue.add_calmly(LLAMA)
        await until(lambda: not first.queue.is_pending(LLAMA), lambda: "it is reconciled")
    assert "observed" in world.object["status"]
    if is_changed:
        file.write_text(serialize_calibration(Calibration((ENTRY,))))
        # An admission review also rereads the calibration; no resync round has queued the object since.
        first.settings.calibration.read()
    await stop(first)
    second.queue.is_open = False  # as with leader election, until this process leads
    await second.start()
    if is_changed:
        reconciles = "specdecode_reconcile_duration_seconds_count", LLAMA.kind, "done"
        await until(lambda: samples(second.metrics)[reconciles] > 0, lambda: "it is reconciled at the start")
        assert second.settled == set()
        await stop(second)
        return
    await until(lambda: second.settled == {LLAMA}, lambda: f"settled: {second.settled}")
    second.queue.add(LLAMA)
    await until(lambda: second.settled == set(), lambda: "it is reconciled")
    await stop(second)
