"""Of several operators one works: the one that has the Lease."""

import asyncio
import re
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from devcluster.cluster.settings import free_ports
from specdecode_operator.cli.main import app
from specdecode_operator.cluster.client import Cluster
from specdecode_operator.cluster.errors import ConflictError
from specdecode_operator.handlers import lifecycle
from specdecode_operator.handlers.leadership import leadership
from specdecode_operator.handlers.leadership.leadership import LeaderCollector, Leadership
from specdecode_operator.handlers.leadership.lease import Candidate, LeaseName
from specdecode_operator.handlers.state import OperatorState
from specdecode_operator.kube.resources import LEASE
from tests.support.api_server import ApiServer
from tests.support.embedded_operator import until
from tests.support.objects import Body
from tests.support.rights import role_rights

ROOT = Path(__file__).parents[4]
NAME = "specdecode-operator"
METADATA = {"namespace": "specdecode-system", "name": NAME}
LEASE_S = 30


def lease_for(identity: str, duration_s: int = LEASE_S) -> LeaseName:
    return LeaseName("specdecode-system", NAME, identity, duration_s)


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
    clock.now_s += LEASE_S / 2
    assert not await second.take()
    assert await first.take()
    clock.now_s += LEASE_S / 2
    assert not await second.take(), "it was renewed"
    clock.now_s += LEASE_S / 2
    assert not await second.take()
    clock.now_s += LEASE_S / 2 - 1
    assert not await second.take()
    clock.now_s += 1
    assert await second.take()
    assert (spec(api)["holderIdentity"], spec(api)["leaseTransitions"], second.transitions) == ("second", 1, 1)
    assert not await first.take(), "the one that had it sees that it lost it"
    assert first.transitions == 1


async def test_while_the_api_server_answers_nobody_the_lease_does_not_end(api: ApiServer, cluster: Cluster) -> None:
    clock = Clock()
    first, second = (Candidate(cluster, lease_for(each), clock) for each in ("first", "second"))
    await first.take()
    await second.take()
    clock.now_s += 10 * LEASE_S
    assert not await second.take(), "the other could renew it no more than this one could look"
    clock.now_s += LEASE_S / 2
    assert await second.take()


async def test_a_renewal_is_one_request_and_one_that_nobody_answered_is_asked_about(
    api: ApiServer, cluster: Cluster
) -> None:
    candidate = Candidate(cluster, lease_for("first"))
    await candidate.take()
    api.requests.clear()
    await candidate.take()
    assert api.requests == [f"patch leases.coordination.k8s.io {NAME}"]
    api.change(LEASE, NAME, metadata={**(api.find(LEASE, NAME) or {})["metadata"], "labels": {"a": "b"}})
    assert await candidate.take(), "somebody wrote into it, and it is held all the same"


@pytest.mark.parametrize("holder", ["", "second"])
async def test_whoever_had_the_lease_does_not_go_on_where_another_had_it_since(
    api: ApiServer, cluster: Cluster, holder: str
) -> None:
    candidate = Candidate(cluster, lease_for("first"))
    await candidate.take()
    api.change(LEASE, NAME, spec={"holderIdentity": holder})
    assert not await candidate.take(only_renew=True)
    assert spec(api)["holderIdentity"] == holder


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
    for _ in range(2):
        clock.now_s += LEASE_S / 2
        taken = await candidate.take()
    assert taken


async def test_a_lease_whose_counter_is_full_can_be_taken(api: ApiServer, cluster: Cluster) -> None:
    made = {"holderIdentity": "", "leaseTransitions": 2**31 - 1}
    api.create(LEASE, {"metadata": {"namespace": "specdecode-system", "name": NAME}, "spec": made})
    assert await Candidate(cluster, lease_for("first")).take()
    assert spec(api)["leaseTransitions"] < 2**31


@asynccontextmanager
async def leading(
    monkeypatch: pytest.MonkeyPatch, identity: str = "first", duration_s: int = LEASE_S
) -> AsyncIterator[tuple[Leadership, list[str]]]:
    """A thread that asks for the Lease, often."""
    monkeypatch.setattr(leadership, "_RETRY_AFTER", 0.0003)
    lost: list[str] = []
    thread = Leadership(lease_for(identity, duration_s), lost.append)
    thread.start()
    try:
        yield thread, lost
    finally:
        await asyncio.to_thread(thread.stop)


def told(thread: Leadership) -> dict[str, float]:
    """What /metrics says."""
    return {sample.name: sample.value for family in LeaderCollector(thread).collect() for sample in family.samples}


async def test_it_works_with_the_lease_and_gives_it_back_at_its_end(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with leading(monkeypatch) as (first, lost):
        await first.led()
        assert told(first) == {"specdecode_leader": 1, "specdecode_lease_transitions": 0}
        async with leading(monkeypatch, "second") as (second, _):
            await until(lambda: second.stands_by, lambda: spec(api)["holderIdentity"])
            assert not second.may_write()
            assert told(second)["specdecode_leader"] == 0
            await asyncio.to_thread(first.stop)
            assert not first.may_write()
            await second.led()
            assert second.may_write()
            assert told(second) == {"specdecode_leader": 1, "specdecode_lease_transitions": 1}
            assert spec(api)["holderIdentity"] == "second"
        assert spec(api)["holderIdentity"] == ""
        assert lost == []


async def test_who_stops_waiting_for_the_lease_disturbs_nobody(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    api.create(LEASE, {"metadata": METADATA, "spec": {"holderIdentity": "other"}})
    async with leading(monkeypatch) as (thread, lost):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await thread.led()
        api.change(LEASE, NAME, spec={"holderIdentity": ""})
        await thread.led()
        assert lost == []


@pytest.mark.parametrize(("holder", "why"), [("other", "other has it"), ("", "nobody has it")])
async def test_whoever_sees_that_another_had_the_lease_ends(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch, holder: str, why: str
) -> None:
    async with leading(monkeypatch) as (thread, lost):
        await thread.led()
        api.change(LEASE, NAME, spec={"holderIdentity": holder})
        await until(lambda: lost, lambda: "it is lost")
        assert lost == [why]
        assert not thread.may_write()
    assert spec(api)["holderIdentity"] == holder, "what is lost is not given back"


def no_answer(api: ApiServer) -> None:
    for verb in ("get", "patch"):
        api.refusals[f"{verb} leases.coordination.k8s.io"] = (500, "etcd is away")


async def test_whoever_cannot_renew_the_lease_writes_nothing_before_another_may_take_it_and_goes_on_if_none_did(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    monkeypatch.setattr(leadership, "_now_s", clock)
    async with leading(monkeypatch) as (thread, lost):
        await thread.led()
        no_answer(api)
        clock.now_s += LEASE_S - 1
        assert not thread.may_write(), "whether or not the thread has had a look"
        assert told(thread)["specdecode_leader"] == 0
        await until(lambda: "nothing is written until" in caplog.text, lambda: "it says so")
        assert not thread.stands_by
        with caplog.at_level("INFO"):
            api.refusals.clear()
            await until(thread.may_write, lambda: "it goes on")
            await until(lambda: "this one goes on" in caplog.text, lambda: "it says so")
        assert lost == []


async def test_a_renewal_counts_from_when_it_was_asked_for_and_not_from_its_answer(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    monkeypatch.setattr(leadership, "_now_s", clock)

    def answers_late() -> None:
        clock.now_s += LEASE_S * 2 / 3

    async with leading(monkeypatch) as (thread, _):
        await thread.led()
        await until(lambda: len(api.requests) > 3, lambda: "it renews")
        api.before["patch leases.coordination.k8s.io"] = answers_late
        await until(lambda: "nothing is written until" in caplog.text, lambda: "it may have been written at once")


async def test_a_connection_that_hangs_leaves_time_for_another(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with leading(monkeypatch, duration_s=6) as (thread, lost):
        await thread.led()
        asked: list[bool] = []

        async def take(*_: object, **__: object) -> bool:
            asked.append(thread.may_write())
            if len(asked) == 1:
                await asyncio.Event().wait()
            return True

        monkeypatch.setattr(Candidate, "take", take)
        await until(lambda: len(asked) > 1, lambda: "it asked again")
        assert asked[1], "in time"
        assert lost == []


async def test_an_api_server_that_is_slow_for_everybody_is_waited_for(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def take(*_: object, **__: object) -> bool:
        await asyncio.sleep(0.9)
        return True

    monkeypatch.setattr(Candidate, "take", take)
    async with leading(monkeypatch, duration_s=2) as (thread, _), asyncio.timeout(60):
        await thread.led()


async def test_one_failure_is_not_the_end(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with leading(monkeypatch) as (thread, lost):
        await thread.led()
        no_answer(api)
        await until(lambda: api.requests.count(f"get leases.coordination.k8s.io {NAME}") > 3, lambda: "it asks")
        assert thread.may_write()
        api.refusals.clear()
        before = spec(api)["renewTime"]
        await until(lambda: spec(api)["renewTime"] > before, lambda: "it is renewed")
        assert lost == []


async def test_readiness_says_who_leads_who_waits_and_who_gets_no_answer(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.create(LEASE, {"metadata": METADATA, "spec": {"holderIdentity": "other"}})
    (port,) = free_ports(1)

    def answer(path: str) -> tuple[int, str]:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _AnyStatus())
        with opener.open(f"http://127.0.0.1:{port}{path}") as found:
            return found.status, found.read().decode()

    async def says(path: str = "/readyz") -> tuple[int, str]:
        return await asyncio.to_thread(answer, path)

    async with leading(monkeypatch) as (thread, _):
        lifecycle.serve_health(port, state := OperatorState(leadership=thread), thread)
        await until(lambda: thread.stands_by, lambda: "it waits")
        assert await says() == (503, "it has not connected yet"), "who has seen nothing could not take over"
        await state.start()
        assert "waits for its Lease" in (await says())[1]
        assert [(await says(path))[0] for path in ("/livez", "/readyz")] == [200, 200]
        no_answer(api)
        await until(lambda: not thread.stands_by, lambda: "it cannot ask")
        assert [(await says(path))[0] for path in ("/livez", "/readyz")] == [200, 503]
        api.refusals.clear()
        api.change(LEASE, NAME, spec={"holderIdentity": ""})
        await thread.led()
        assert await says() == (200, "ok")
        await state.stop()
        assert spec(api)["holderIdentity"] == ""


class _AnyStatus(urllib.request.HTTPErrorProcessor):
    def http_response(self, _: Any, response: Any) -> Any:
        return response


@pytest.mark.parametrize(("name", "namespace", "fix"), [("l", "", "POD_NAMESPACE"), ("", "n", "name a Lease")])
def test_a_lease_needs_a_name_and_a_namespace(name: str, namespace: str, fix: str) -> None:
    answer = CliRunner().invoke(app, ["operator", f"--leader-election={name}"], env={"POD_NAMESPACE": namespace})
    assert answer.exit_code == 2
    assert fix in answer.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--leader-election=l", "--lease-duration=3"], "--lease-duration: 3: give 4 to 300 seconds"),
        (["--lease-duration=6"], "is for --leader-election alone"),
    ],
)
def test_how_long_a_lease_lasts_has_bounds_and_goes_with_a_lease(options: list[str], message: str) -> None:
    answer = CliRunner().invoke(app, ["operator", *options], env={"POD_NAMESPACE": "n", "COLUMNS": "200"})
    assert answer.exit_code == 2
    assert message in " ".join(answer.output.replace("\u2502", " ").split())
