"""Leader election, namespace claims, and the gate before each write."""

import asyncio
import logging
import re
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from typer.testing import CliRunner

from devcluster.cluster.settings import free_ports
from specdecode_operator.cli.main import app
from specdecode_operator.cluster.client import Cluster, ConflictError, NotLeadingError
from specdecode_operator.cluster.resources import LEASE, POD, SERVICE, SPECDECODE_DEPLOYMENT
from specdecode_operator.cluster.rights import SERVES
from specdecode_operator.handlers import leadership, main
from specdecode_operator.handlers.leadership import CLAIM_S, Candidate, Claims, LeaderCollector, Leadership, LeaseName
from specdecode_operator.handlers.main import OperatorState
from tests.support.api_server import ApiServer
from tests.support.embedded_operator import until
from tests.support.objects import Body

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


@pytest.mark.parametrize(("holder", "why"), [("other", "held by other"), ("", "not held")])
async def test_leadership_is_lost_if_the_holder_changes(
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


async def test_writes_stop_before_an_unrenewed_lease_ends_and_resume_after_renewal(
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
        await until(lambda: "lease not renewed" in caplog.text, lambda: "it says so")
        assert not thread.stands_by
        with caplog.at_level("INFO"):
            api.refusals.clear()
            await until(thread.may_write, lambda: "it goes on")
            await until(lambda: "resuming writes" in caplog.text, lambda: "it says so")
        assert lost == []


async def test_lease_renewal_counts_from_the_request_not_the_answer(
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
        await until(lambda: "lease not renewed" in caplog.text, lambda: "it may have been written at once")


async def test_readiness_distinguishes_leader_standby_and_no_answer(
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
        main.serve_health(port, state := OperatorState(leadership=thread), thread)
        await until(lambda: thread.stands_by, lambda: "it waits")
        status, _ = await says()
        assert status == 503, "a replica that has seen nothing could not take over"
        await state.start()
        assert "standby" in (await says())[1]
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


@pytest.mark.parametrize(
    ("name", "namespace", "fix"), [("l", "", "POD_NAMESPACE"), ("", "n", "set the name of a Lease")]
)
def test_leader_election_requires_lease_name_and_namespace(name: str, namespace: str, fix: str) -> None:
    answer = CliRunner().invoke(app, ["operator", f"--leader-election={name}"], env={"POD_NAMESPACE": namespace})
    assert answer.exit_code == 2
    assert fix in answer.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--leader-election=l", "--lease-duration=3"], "--lease-duration: 3: must be 4 to 300 seconds"),
        (["--lease-duration=6"], "--lease-duration: 6: requires --leader-election: add --leader-election LEASE"),
    ],
)
def test_lease_duration_is_bounded_and_requires_leader_election(options: list[str], message: str) -> None:
    answer = CliRunner().invoke(app, ["operator", *options], env={"POD_NAMESPACE": "n", "COLUMNS": "200"})
    assert answer.exit_code == 2
    assert message in " ".join(answer.output.replace("\u2502", " ").split())


async def test_standby_takes_the_lease_only_after_it_is_not_renewed(api: ApiServer, cluster: Cluster) -> None:
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
    assert (spec(api)["holderIdentity"], spec(api)["leaseTransitions"], second.transitions) == (
        "second",
        1,
        1,
    )
    assert not await first.take(), "the one that had it sees that it lost it"
    assert first.transitions == 1


async def test_lease_does_not_end_while_the_api_server_was_unobserved(api: ApiServer, cluster: Cluster) -> None:
    clock = Clock()
    first, second = (Candidate(cluster, lease_for(each), clock) for each in ("first", "second"))
    await first.take()
    await second.take()
    clock.now_s += 10 * LEASE_S
    assert not await second.take(), "the other could renew it no more than this one could look"
    clock.now_s += LEASE_S / 2
    assert await second.take()


@pytest.mark.parametrize("holder", ["", "second"])
async def test_former_holder_does_not_renew_after_a_holder_change(
    api: ApiServer, cluster: Cluster, holder: str
) -> None:
    candidate = Candidate(cluster, lease_for("first"))
    await candidate.take()
    api.change(LEASE, NAME, spec={"holderIdentity": holder})
    assert not await candidate.take(only_renew=True)
    assert spec(api)["holderIdentity"] == holder


async def test_restarted_container_continues_the_lease_of_its_pod(api: ApiServer, cluster: Cluster) -> None:
    await Candidate(cluster, lease_for("pod-1")).take()
    acquired = spec(api)["acquireTime"]
    assert await Candidate(cluster, lease_for("pod-1")).take()
    assert (spec(api)["acquireTime"], spec(api)["leaseTransitions"]) == (acquired, 0)


async def test_release_does_not_clear_a_lease_taken_meanwhile(
    api: ApiServer, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, get = Candidate(cluster, lease_for("first")), cluster.get
    await first.take()

    async def then_another(*asked: Any) -> Any:
        seen = await get(*asked)
        api.change(LEASE, NAME, spec={**spec(api), "holderIdentity": "second"})
        return seen

    monkeypatch.setattr(cluster, "get", then_another)
    with pytest.raises(ConflictError):
        await first.release()
    assert spec(api)["holderIdentity"] == "second"


async def test_deleted_lease_is_recreated_in_the_same_attempt(api: ApiServer, cluster: Cluster) -> None:
    candidate = Candidate(cluster, lease_for("first"))
    await candidate.take()
    api.remove(LEASE, NAME)
    assert await candidate.take()
    assert spec(api)["holderIdentity"] == "first"


async def test_concurrent_lease_takeover_has_one_winner(api: ApiServer, cluster: Cluster) -> None:
    first, second = (Candidate(cluster, lease_for(each)) for each in ("first", "second"))
    made = {"metadata": METADATA, "spec": {"holderIdentity": "first"}}
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
async def test_invalid_duration_in_a_foreign_lease_is_not_used(api: ApiServer, cluster: Cluster, lasts: object) -> None:
    made = {"holderIdentity": "x\nINFO forged", "leaseDurationSeconds": lasts, "leaseTransitions": "many"}
    made["renewTime"] = "2001-01-01T00:00:00.000000Z"
    api.create(LEASE, {"metadata": METADATA, "spec": made})
    clock = Clock()
    candidate = Candidate(cluster, lease_for("first"), clock)
    assert not await candidate.take()
    assert "\n" not in candidate.holder
    for _ in range(2):
        clock.now_s += LEASE_S / 2
        taken = await candidate.take()
    assert taken


def holder(api: ApiServer) -> str:
    return str((api.find(LEASE, SERVES) or {"spec": {}})["spec"].get("holderIdentity"))


async def test_cluster_operator_skips_namespaces_claimed_by_another(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    named, whole = Claims(cluster, ["team"], "team/ours"), Claims(cluster, [], "system/all", clock)
    await whole.look()
    assert whole.serves("team")
    await named.look()
    assert named.serves("team")
    with caplog.at_level(logging.WARNING):
        await whole.look()
        await whole.look()
    assert not whole.serves("team")
    assert whole.serves("others")
    (told,) = caplog.messages
    assert told == f"namespace team is skipped: team/ours serves it (lease {SERVES})"

    clock.now_s += CLAIM_S / 2
    await whole.look()
    await named.look()
    await whole.look()
    clock.now_s += CLAIM_S
    await whole.look()
    assert not whole.serves("team"), "it was renewed, and who has not looked for long does not know"
    clock.now_s += CLAIM_S / 2
    await whole.look()
    assert whole.serves("team"), "nobody has renewed it"


async def test_first_of_two_operators_naming_a_namespace_serves_it(api: ApiServer, cluster: Cluster) -> None:
    first, second = Claims(cluster, ["team"], "a/first"), Claims(cluster, ["team"], "b/second")
    await first.look()
    await second.look()
    assert (first.serves("team"), second.serves("team")) == (True, False)
    await second.release()
    assert holder(api) == "a/first"


async def test_unreadable_leases_change_no_claims(
    api: ApiServer, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    named, whole = Claims(cluster, ["team"], "team/ours"), Claims(cluster, [], "system/all")
    second = Claims(cluster, ["team"], "team/second")
    await named.look()
    await whole.look()
    await second.look()
    lease = "leases.coordination.k8s.io"
    api.refusals |= {f"{verb} {lease}": (500, "etcd is slow") for verb in ("list", "get")}
    await named.look()
    await whole.look()
    await second.look()
    assert (named.serves("team"), whole.serves("team"), second.serves("team")) == (True, False, False)
    assert [message for message in caplog.messages if "cannot " in message and "etcd is slow" in message]


LLAMA = {"namespace": "team", "name": "llama"}
BODY: Body = {"apiVersion": "v1", "kind": "Service", "metadata": {**LLAMA, "uid": "1"}}
WRITES: dict[str, Callable[[Cluster], Awaitable[object]]] = {
    "apply": lambda cluster: cluster.apply(BODY),
    "apply_new": lambda cluster: cluster.apply_new(BODY),
    "apply_status": lambda cluster: cluster.apply_status(SPECDECODE_DEPLOYMENT, BODY),
    "create": lambda cluster: cluster.create(BODY),
    "delete": lambda cluster: cluster.delete(BODY),
    "evict": lambda cluster: cluster.evict(BODY),
    "merge": lambda cluster: cluster.merge(BODY, {}),
    "post_event": lambda cluster: asyncio.to_thread(cluster.post_event, {"metadata": LLAMA}),
    "try_create": lambda cluster: cluster.try_create(POD, BODY),
    "take_over_fields": lambda cluster: cluster.take_over_fields(BODY, ()),
}
READS = {"close", "connect", "events_posted", "get", "list", "pages"}


def test_every_cluster_method_is_classified_as_read_or_write() -> None:
    assert {name for name in vars(Cluster) if not name.startswith("_")} == {*WRITES, *READS}


@pytest.mark.parametrize("name", WRITES)
async def test_nothing_is_written_without_the_lease(api: ApiServer, name: str) -> None:
    uid = api.create(SERVICE, {"metadata": LLAMA})["metadata"]["uid"]
    BODY["metadata"]["uid"] = uid
    cluster = await Cluster.connect(may_write=lambda: False)
    try:
        with pytest.raises(NotLeadingError, match="not the leader"):
            await WRITES[name](cluster)
        assert await cluster.get(SERVICE, "team", "llama") is not None
        assert await cluster.list(POD) is not None
    finally:
        await cluster.close()
    assert {request.split()[0] for request in api.requests} <= {"get", "list"}
