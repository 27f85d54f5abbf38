"""Of several operators one works: the one that has the Lease."""

import asyncio
import re
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prometheus_client import Gauge
from typer.testing import CliRunner

from devcluster.cluster.settings import free_ports
from specdecode_operator.cli.main import app
from specdecode_operator.cluster.client import Cluster
from specdecode_operator.cluster.errors import ConflictError
from specdecode_operator.handlers import lifecycle
from specdecode_operator.handlers.leadership import leadership
from specdecode_operator.handlers.leadership.leadership import Leadership, leader_gauge
from specdecode_operator.handlers.leadership.lease import LEASE_S, Candidate, LeaseName
from specdecode_operator.handlers.state import OperatorState
from specdecode_operator.kube.resources import LEASE
from tests.support.api_server import ApiServer
from tests.support.embedded_operator import until
from tests.support.objects import Body
from tests.support.rights import role_rights

ROOT = Path(__file__).parents[4]
NAME = "specdecode-operator"


def lease_for(identity: str) -> LeaseName:
    return LeaseName("specdecode-system", NAME, identity)


def spec(api: ApiServer) -> Body:
    found: Body = (api.find(LEASE, NAME) or {"spec": {}})["spec"]
    return found


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


async def test_one_of_two_has_the_lease_until_it_has_not_renewed_it(api: ApiServer, cluster: Cluster) -> None:
    clock = Clock()
    first, second = (Candidate(cluster, lease_for(each), clock) for each in ("first", "second"))
    assert await first.take()
    assert spec(api)["holderIdentity"] == "first"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", spec(api)["renewTime"])
    assert not await second.take(), "it has just seen it for the first time"
    clock.now_s += LEASE_S - 1
    assert await first.take()
    clock.now_s += 1
    assert not await second.take(), "it was renewed"
    clock.now_s += LEASE_S - 1
    assert not await second.take()
    clock.now_s += 1
    assert await second.take()
    assert (spec(api)["holderIdentity"], spec(api)["leaseTransitions"]) == ("second", 1)
    assert not await first.take(), "the one that had it sees that it lost it"


async def test_a_container_that_starts_anew_goes_on_with_the_lease_of_its_pod(api: ApiServer, cluster: Cluster) -> None:
    await Candidate(cluster, lease_for("pod-1")).take()
    acquired = spec(api)["acquireTime"]
    assert await Candidate(cluster, lease_for("pod-1")).take()
    assert (spec(api)["acquireTime"], spec(api)["leaseTransitions"]) == (acquired, 0)


async def test_a_lease_that_was_given_back_is_taken_at_once(api: ApiServer, cluster: Cluster) -> None:
    first, second = (Candidate(cluster, lease_for(each)) for each in ("first", "second"))
    assert await first.take()
    await second.release()
    assert spec(api)["holderIdentity"] == "first", "only whoever has it gives it back"
    await first.release()
    assert await second.take()


async def test_the_role_grants_exactly_what_the_lease_takes(api: ApiServer, cluster: Cluster) -> None:
    roles = yaml.safe_load_all((ROOT / "manifests/operator-role.yaml").read_text())
    (rules,) = (role["rules"] for role in roles if role["kind"] == "Role")
    rules = [rule for rule in rules if "leases" in rule["resources"]]
    api.granted = role_rights(rules)
    candidate = Candidate(cluster, lease_for("first"))
    assert [await candidate.take(), await candidate.take()] == [True, True]
    await candidate.release()
    assert api.used == api.granted
    assert {*rules[0]["verbs"], *rules[1]["verbs"]} == {"create", "get", "patch"}
    assert rules[1]["resourceNames"] == [NAME], "no name can narrow what may be created"


async def test_of_two_that_take_it_at_once_one_does(api: ApiServer, cluster: Cluster) -> None:
    first, second = (Candidate(cluster, lease_for(each)) for each in ("first", "second"))
    made = {"metadata": {"namespace": "specdecode-system", "name": NAME}, "spec": {"holderIdentity": "first"}}
    api.before["create leases.coordination.k8s.io"] = lambda: api.create(LEASE, made)
    with pytest.raises(ConflictError):
        await second.take()
    await first.release()
    taken = {"holderIdentity": "third", "leaseDurationSeconds": LEASE_S}
    api.before["patch leases.coordination.k8s.io"] = lambda: api.change(LEASE, NAME, spec=taken)
    with pytest.raises(ConflictError):
        await second.take()
    assert spec(api) == taken


@pytest.mark.parametrize("lasts", [None, "x", -5, 0, 10**9, 1.5])
async def test_how_long_a_foreign_lease_lasts_is_not_believed_blindly(
    api: ApiServer, cluster: Cluster, lasts: object
) -> None:
    made = {"holderIdentity": "x\nINFO forged", "leaseDurationSeconds": lasts, "leaseTransitions": "many"}
    api.create(LEASE, {"metadata": {"namespace": "specdecode-system", "name": NAME}, "spec": made})
    clock = Clock()
    candidate = Candidate(cluster, lease_for("first"), clock)
    assert not await candidate.take()
    assert "\n" not in candidate.holder
    clock.now_s += LEASE_S
    assert await candidate.take()


async def test_a_lease_whose_counter_is_full_can_be_taken(api: ApiServer, cluster: Cluster) -> None:
    made = {"holderIdentity": "", "leaseTransitions": 2**31 - 1}
    api.create(LEASE, {"metadata": {"namespace": "specdecode-system", "name": NAME}, "spec": made})
    assert await Candidate(cluster, lease_for("first")).take()
    assert spec(api)["leaseTransitions"] < 2**31


@asynccontextmanager
async def leading(
    monkeypatch: pytest.MonkeyPatch, identity: str = "first"
) -> AsyncIterator[tuple[Leadership, Gauge, list[str]]]:
    """A thread that asks for the Lease, often."""
    monkeypatch.setattr(leadership, "_RETRY_S", 0.01)
    lost: list[str] = []
    thread = Leadership(lease_for(identity), gauge := leader_gauge().labels("Cluster"), lost.append)
    thread.start()
    try:
        yield thread, gauge, lost
    finally:
        await asyncio.to_thread(thread.stop)


def works(gauge: Gauge) -> bool:
    (metric,) = gauge.collect()
    return metric.samples[0].value == 1


async def test_it_works_with_the_lease_and_gives_it_back_at_its_end(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with leading(monkeypatch) as (first, its_gauge, lost):
        await asyncio.to_thread(first.wait)
        assert works(its_gauge)
        async with leading(monkeypatch, "second") as (second, other_gauge, _):
            await until(lambda: second.stands_by, lambda: spec(api)["holderIdentity"])
            assert not works(other_gauge)
            await asyncio.to_thread(first.stop)
            await asyncio.to_thread(second.wait)
            assert works(other_gauge)
            assert spec(api)["holderIdentity"] == "second"
        assert spec(api)["holderIdentity"] == ""
        assert lost == []


def another_takes_it(api: ApiServer) -> None:
    api.change(LEASE, NAME, spec={"holderIdentity": "other"})


def no_answer(api: ApiServer) -> None:
    api.refusals["get leases.coordination.k8s.io"] = (500, "etcd is away")


@pytest.mark.parametrize(("happens", "why"), [(another_takes_it, "other has it"), (no_answer, "etcd is away|in time")])
async def test_whoever_loses_the_lease_ends(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch, happens: Callable[[ApiServer], None], why: str
) -> None:
    if happens is no_answer:
        monkeypatch.setattr(leadership, "RENEW_WITHIN_S", 0.5)
    async with leading(monkeypatch) as (thread, gauge, lost):
        await asyncio.to_thread(thread.wait)
        happens(api)
        await until(lambda: lost, lambda: "it is lost")
        assert re.search(why, lost[0])
        assert not works(gauge)
    assert spec(api)["holderIdentity"] != "", "what is lost is not given back"


async def test_whoever_cannot_renew_the_lease_ends_before_another_may_take_it(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(leadership, "time", SimpleNamespace(monotonic=clock))
    async with leading(monkeypatch) as (thread, _, lost):
        await asyncio.to_thread(thread.wait)
        no_answer(api)
        clock.now_s += LEASE_S - 1
        await until(lambda: lost, lambda: "it ends")


async def test_a_renewal_counts_from_when_it_was_asked_for_and_not_from_its_answer(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(leadership, "time", SimpleNamespace(monotonic=clock))

    def answers_late() -> None:
        clock.now_s += leadership.RENEW_WITHIN_S

    async with leading(monkeypatch) as (thread, _, lost):
        await asyncio.to_thread(thread.wait)
        api.before["patch leases.coordination.k8s.io"] = answers_late
        await until(lambda: lost, lambda: "the Lease may have been written when it was asked for")


async def test_one_failure_is_not_the_end(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with leading(monkeypatch) as (thread, _, lost):
        await asyncio.to_thread(thread.wait)
        no_answer(api)
        await until(lambda: api.requests.count(f"get leases.coordination.k8s.io {NAME}") > 3, lambda: "it asks")
        api.refusals.clear()
        before = spec(api)["renewTime"]
        await until(lambda: spec(api)["renewTime"] > before, lambda: "it is renewed")
        assert lost == []


async def test_whoever_waits_is_ready_and_whoever_cannot_ask_is_not(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {"metadata": {"namespace": "specdecode-system", "name": NAME}, "spec": {"holderIdentity": "other"}}
    api.create(LEASE, made)
    (port,) = free_ports(1)

    def answer(path: str) -> tuple[int, str]:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _AnyStatus())
        with opener.open(f"http://127.0.0.1:{port}{path}") as found:
            return found.status, found.read().decode()

    async with leading(monkeypatch) as (thread, _, _):
        lifecycle.serve_health(port, OperatorState(), thread)
        await until(lambda: thread.stands_by, lambda: "it waits")
        assert [(await asyncio.to_thread(answer, path))[0] for path in ("/livez", "/readyz")] == [200, 200]
        assert "waits for its Lease" in (await asyncio.to_thread(answer, "/readyz"))[1]
        no_answer(api)
        await until(lambda: not thread.stands_by, lambda: "it cannot ask")
        assert [(await asyncio.to_thread(answer, path))[0] for path in ("/livez", "/readyz")] == [200, 503]


class _AnyStatus(urllib.request.HTTPErrorProcessor):
    def http_response(self, _: Any, response: Any) -> Any:
        return response


@pytest.mark.parametrize(("name", "namespace", "fix"), [("l", "", "POD_NAMESPACE"), ("", "n", "name a Lease")])
def test_a_lease_needs_a_name_and_a_namespace(name: str, namespace: str, fix: str) -> None:
    answer = CliRunner().invoke(app, ["operator", f"--leader-election={name}"], env={"POD_NAMESPACE": namespace})
    assert answer.exit_code == 2
    assert fix in answer.output
