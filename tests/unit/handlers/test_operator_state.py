"""Start and health of the operator."""

import asyncio
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.api import capture, training
from specdecode_operator.api.deployment import Key
from specdecode_operator.cluster import client
from specdecode_operator.cluster.client import ClusterError
from specdecode_operator.cluster.resources import (
    DEPLOYMENT,
    HTTP_ROUTE,
    LEADER_WORKER_SET,
    LEASE,
    NODE,
    OPTIONAL,
    POD,
    SPECDECODE_CAPTURE,
    SPECDECODE_DEPLOYMENT,
    WATCHED,
    Resource,
)
from specdecode_operator.cluster.rights import SERVES
from specdecode_operator.deployment.autoscaler import LOAD_METRIC
from specdecode_operator.deployment.models.checkpoint_reader import Checkpoint
from specdecode_operator.deployment.observed.replica_load import ReplicaLoad
from specdecode_operator.deployment.requeue import Requeue
from specdecode_operator.handlers import main
from specdecode_operator.handlers.main import OperatorState, OperatorStuckError
from specdecode_operator.handlers.mounted_files import CalibrationFile, FactsFolder, read_facts_file
from specdecode_operator.handlers.settings import Settings
from specdecode_operator.sizing.calibration import Calibration, serialize_calibration
from tests.support.api_server import ApiServer
from tests.support.embedded_operator import until
from tests.support.facts_files import write_facts
from tests.support.objects import tiny_cpu
from tests.unit.deployment.group_pods import WIDE, spec_at
from tests.unit.handlers.reconciler_world import pod_metadata
from tests.unit.handlers.resync_rounds import GROUPS, LLAMA, Rounds, add, add_node, reason, stop
from tests.unit.handlers.test_metrics import samples
from tests.unit.sizing.test_calibration import ENTRY


class TestHealth:
    @pytest.mark.parametrize("ended", [0, 1], ids=["the queue", "the resync"])
    async def test_ended_background_task_is_reported(self, api: ApiServer, state: OperatorState, ended: int) -> None:
        await state.start()
        state._tasks[ended].cancel()
        await asyncio.wait([state._tasks[ended]])
        with pytest.raises(OperatorStuckError, match="has ended"):
            state.check()

    @pytest.mark.parametrize(("waited_s", "stuck"), [(240.0, False), (301.0, True)])
    async def test_object_that_waits_over_300_seconds_is_reported(
        self, monkeypatch: pytest.MonkeyPatch, waited_s: float, *, stuck: bool
    ) -> None:
        state = OperatorState()
        state.queue.add(LLAMA)
        began = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: began + waited_s)
        if stuck:
            with pytest.raises(OperatorStuckError, match="no progress for more than 300 s"):
                state.check()
        else:
            state.check()

    async def test_long_queue_with_progress_is_healthy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        state, worked = OperatorState(), asyncio.Queue[Key]()
        now_s = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now_s)

        async def work(key: Key) -> None:
            worked.put_nowait(key)
            if key.name != "0":
                await asyncio.Event().wait()

        for number in range(40):  # more than there are workers
            state.queue.add(Key("team", str(number)))
        now_s += 10_000.0
        task = asyncio.create_task(state.queue.run(work))
        for _ in range(17):
            await worked.get()
        assert state.queue.longest_wait_s() > 300
        state.check()
        now_s += 301.0
        with pytest.raises(OperatorStuckError, match="no progress"):
            state.check()
        task.cancel()

    @pytest.mark.parametrize(("silent_s", "stuck"), [(240.0, False), (301.0, True)])
    async def test_event_loop_blocked_over_300_seconds_is_reported(
        self, api: ApiServer, state: OperatorState, monkeypatch: pytest.MonkeyPatch, silent_s: float, *, stuck: bool
    ) -> None:
        await state.start()
        now_s = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now_s + silent_s)
        if stuck:
            with pytest.raises(OperatorStuckError, match="has been blocked for more than 300 s"):
                state.check()
        else:
            state.check()


class TestStart:
    @pytest.mark.parametrize("resource", [NODE, SPECDECODE_DEPLOYMENT, *WATCHED], ids=lambda each: each.kind)
    async def test_not_started_before_each_kind_is_listed(
        self, api: ApiServer, state: OperatorState, resource: Resource
    ) -> None:
        seen: list[bool] = []
        api.before[f"list {resource.qualified_plural}"] = lambda: seen.append(state.has_started)
        await state.start()
        assert (seen[0], state.has_started) == (False, True)

    @pytest.mark.parametrize("status", [404, 403])
    async def test_start_works_without_leader_worker_sets(
        self, api: ApiServer, state: OperatorState, rounds: Rounds, status: int
    ) -> None:
        api.refusals[f"list {GROUPS}"] = (status, "no")
        add(api, spec=spec_at(WIDE))
        add_node(api, "a")
        add_node(api, "b")
        await state.start()
        await rounds.go()
        await until(lambda: reason(api, "Planned"), lambda: "the object is planned")
        assert LEADER_WORKER_SET.kind not in state.cache.optional_kinds
        api.refusals.clear()
        await rounds.go()
        await until(lambda: "llama-lws" in api.names(LEADER_WORKER_SET), lambda: "they are used once they come")

    @pytest.mark.parametrize("status", [404, 403])
    async def test_a_route_is_made_once_the_cluster_has_routes(
        self, api: ApiServer, state: OperatorState, rounds: Rounds, status: int
    ) -> None:
        api.refusals[f"list {HTTP_ROUTE.qualified_plural}"] = (status, "no")
        add(api, spec=tiny_cpu(expose={"httpRoute": {"parentRefs": [{"name": "public"}]}}))
        await state.start()
        await until(lambda: reason(api, "Exposed") == "GatewayApiMissing", lambda: "the route waits")
        assert api.names(HTTP_ROUTE) == []
        api.refusals.clear()
        await rounds.go()
        await until(lambda: api.names(HTTP_ROUTE) == ["llama"], lambda: "the route is made once the kind comes")

    async def test_start_fails_if_another_kind_cannot_be_listed(self, api: ApiServer, state: OperatorState) -> None:
        for resource in (each for each in WATCHED if each not in OPTIONAL):
            api.refusals = {f"list {resource.qualified_plural}": (403, "no")}
            with pytest.raises(ClusterError):
                await state.start()

    async def test_paged_lists_are_complete(
        self, api: ApiServer, state: OperatorState, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(client, "_PAGE", 3)
        names = [f"llama-{number}" for number in range(8)]
        for name in names:
            add(api, name)
        await state.start()
        assert sorted(key.name for key in state.cache.parents()) == names
        assert api.requests.count(f"list {SPECDECODE_DEPLOYMENT.qualified_plural}") == 3


class TestEvents:
    """Pod events, some of which need no reconcile."""

    async def test_failed_pod_is_reconciled_and_a_starting_one_is_not(
        self, api: ApiServer, state: OperatorState, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reconciled, reconcile = list[Key](), main.Reconciler.reconcile

        async def noted(reconciler: main.Reconciler, key: Key) -> Requeue:
            reconciled.append(key)
            return await reconcile(reconciler, key)

        async def is_done() -> None:
            await until(lambda: not state.queue.is_pending(LLAMA), lambda: "the queue is empty")

        monkeypatch.setattr(main.Reconciler, "reconcile", noted)
        add(api)
        await state.start()
        await is_done()
        workload = api.find(DEPLOYMENT, "llama")
        assert workload is not None
        metadata = {**pod_metadata(workload), "namespace": "team", "name": "llama-1"}
        pod = api.create(POD, {"metadata": metadata, "status": {"phase": "Pending"}})
        for expected in ([], [LLAMA]):
            reconciled.clear()
            state.handle("MODIFIED", {"kind": POD.kind, **pod})
            await is_done()
            assert reconciled == expected
            pod = api.change(POD, "llama-1", status={"phase": "Failed"})


class TestFiles:
    """Mounted facts and calibration, which no watch reports."""

    async def test_first_reconcile_waits_for_the_facts(
        self, api: ApiServer, rounds: Rounds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        del rounds  # No resync round starts.
        begun, go_on, known = threading.Event(), threading.Event(), list[set[str]]()

        def read(file: Path) -> Mapping[str, Checkpoint]:
            begun.set()
            assert go_on.wait(60)
            return read_facts_file(file)

        async def reconcile(*_: Any) -> Requeue:
            known.append({*folder.known})
            return Requeue(is_close=False)

        monkeypatch.setattr(main.Reconciler, "reconcile", reconcile)
        write_facts(tmp_path, "tiny.json", "site/tiny")
        folder = FactsFolder(tmp_path, read)
        add(api)
        state = OperatorState(Settings(facts=folder))
        try:
            await state.start()
            await asyncio.to_thread(begun.wait, 60)
            for _ in range(20):  # Let the workers run.
                await asyncio.sleep(0)
            go_on.set()
            await until(lambda: known, lambda: "it is reconciled")
        finally:
            go_on.set()
            await stop(state)
        assert known[0] == {"site/tiny"}

    async def test_all_objects_are_reconciled_after_another_calibration(
        self, api: ApiServer, rounds: Rounds, looked: list[str], tmp_path: Path
    ) -> None:
        file, names = tmp_path / "calibration.json", [f"llama-{number}" for number in range(8)]
        for name in names:
            add(api, name)
        state = OperatorState(Settings(calibration=CalibrationFile(file)))

        async def is_done() -> None:
            await until(
                lambda: not any(map(state.queue.is_pending, state.cache.parents())), lambda: "the queue is empty"
            )

        try:
            await state.start()
            await is_done()
            await rounds.go()
            await is_done()
            looked.clear()
            file.write_text(serialize_calibration(Calibration((ENTRY,))))
            await rounds.go()
            await is_done()
        finally:
            await stop(state)
        assert {*looked} == {*names}


class TestClaims:
    """Namespaces that another operator serves for a time."""

    NAMES = ("a", "b", "c")

    @pytest.fixture(autouse=True)
    async def _begin(
        self, api: ApiServer, state: OperatorState, looked: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def reconcile(_: Any, key: Key) -> None:
            looked.append(key.name)

        monkeypatch.setattr(main.CaptureReconciler, "reconcile", reconcile)
        for name in self.NAMES:
            add(api, name)
        metadata = {"namespace": "team", "name": "demo"}
        api.create(SPECDECODE_CAPTURE, {"metadata": metadata, "spec": {"deployment": "a"}})
        await state.start()
        state.metrics.set_load(Key("team", "a"), ReplicaLoad(8.0, 1.0, "measured"))
        await until(lambda: sorted(looked) == ["a", "b", "c", "demo"], lambda: f"all are reconciled: {looked}")
        looked.clear()

    async def serve(self, api: ApiServer, state: OperatorState, rounds: Rounds) -> None:
        """Let another operator claim the namespace."""
        spec = {"holderIdentity": "other", "leaseDurationSeconds": 30}
        api.create(LEASE, {"metadata": {"namespace": "team", "name": SERVES}, "spec": spec})
        await rounds.go()
        keys = state.cache.parents()
        await until(lambda: not any(map(state.queue.is_pending, keys)), lambda: "the queue is empty")

    async def test_state_of_objects_of_another_operator_is_dropped(
        self, api: ApiServer, state: OperatorState, rounds: Rounds, looked: list[str]
    ) -> None:
        await self.serve(api, state, rounds)
        assert looked == []
        assert not [key for key in samples(state.metrics) if key[0] == LOAD_METRIC], (
            "load metrics of dropped objects are removed"
        )

    async def test_state_of_captures_and_trainings_of_another_operator_is_dropped(
        self, api: ApiServer, state: OperatorState, rounds: Rounds, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        forgotten = set[tuple[str, Key]]()
        for kind, reconciler in (("capture", main.CaptureReconciler), ("training", main.TrainingReconciler)):
            monkeypatch.setattr(reconciler, "forget", lambda _, key, kind=kind: forgotten.add((kind, key)))
        metadata = {"namespace": "team", "name": "head", "uid": "head", "resourceVersion": "1"}
        state.cache.put_parent(training.KIND, {"metadata": metadata, "spec": {"deployment": "a"}})
        await self.serve(api, state, rounds)
        demo, head = Key("team", "demo", capture.KIND), Key("team", "head", training.KIND)
        assert forgotten == {("capture", demo), ("training", head)}

    async def test_objects_of_another_operator_have_few_turns(
        self, api: ApiServer, state: OperatorState, rounds: Rounds
    ) -> None:
        await self.serve(api, state, rounds)
        assert len(state.turns.next(state.cache.parents(), 0.0)) == 1

    async def test_all_objects_are_reconciled_once_the_namespace_is_served_again(
        self, api: ApiServer, state: OperatorState, rounds: Rounds, looked: list[str]
    ) -> None:
        await self.serve(api, state, rounds)
        api.change(LEASE, SERVES, spec={"holderIdentity": ""})
        await rounds.go()
        await until(lambda: sorted(looked) == ["a", "b", "c", "demo"], lambda: f"all are reconciled: {looked}")
