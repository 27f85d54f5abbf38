"""Of several operators one works: the thread that holds the Lease meanwhile, and what is told of it."""

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
from specdecode_operator.handlers.operator_state import OperatorState
from specdecode_operator.handlers.settings import Settings
from tests.support.api_server import ApiServer
from tests.support.embedded_operator import until
from tests.support.objects import Body
from tests.support.waiting import DEADLINE_S

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
    clock, given_s = Clock(), list[float]()

    class NotedTimeouts:
        """Notes how long each look may take."""

        @staticmethod
        def timeout(wait_s: float) -> asyncio.Timeout:
            given_s.append(wait_s)
            return asyncio.timeout(wait_s)

        def __getattr__(self, name: str) -> Any:
            return getattr(asyncio, name)

    monkeypatch.setattr(leadership, "_now_s", clock)
    monkeypatch.setattr(leadership, "asyncio", NotedTimeouts())
    async with leading(monkeypatch) as (thread, lost):
        await thread.led()
        asked: list[bool] = []

        async def take(*_: object, **__: object) -> bool:
            asked.append(thread.may_write())
            if len(asked) == 1:  # it hangs for as long as it may
                clock.now_s += given_s[-1]
                raise TimeoutError
            return True

        monkeypatch.setattr(Candidate, "take", take)
        await until(lambda: len(asked) > 1, lambda: "it asked again")
        assert asked[1], "in time"
        assert lost == []


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


@pytest.mark.parametrize(("name", "namespace", "fix"), [("l", "", "POD_NAMESPACE"), ("", "n", "name a Lease")])
def test_a_lease_needs_a_name_and_a_namespace(name: str, namespace: str, fix: str) -> None:
    answer = CliRunner().invoke(app, ["operator", f"--leader-election={name}"], env={"POD_NAMESPACE": namespace})
    assert answer.exit_code == 2
    assert fix in answer.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--leader-election=l", "--lease-duration=3"], "--lease-duration: 3: give 4 to 300 seconds"),
        (["--lease-duration=6"], "--lease-duration: 6: goes with --leader-election only: add --leader-election LEASE"),
    ],
)
def test_how_long_a_lease_lasts_has_bounds_and_goes_with_a_lease(options: list[str], message: str) -> None:
    answer = CliRunner().invoke(app, ["operator", *options], env={"POD_NAMESPACE": "n", "COLUMNS": "200"})
    assert answer.exit_code == 2
    assert message in " ".join(answer.output.replace("\u2502", " ").split())


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
    assert (spec(api)["holderIdentity"], spec(api)["leaseTransitions"], second.transitions) == (
        "second",
        1,
        1,
    )
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


async def test_a_lease_that_another_takes_meanwhile_is_not_given_away(
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


async def test_a_lease_that_somebody_deleted_is_made_anew_in_the_same_look(api: ApiServer, cluster: Cluster) -> None:
    candidate = Candidate(cluster, lease_for("first"))
    await candidate.take()
    api.remove(LEASE, NAME)
    assert await candidate.take()
    assert spec(api)["holderIdentity"] == "first"


async def test_of_two_that_take_it_at_once_one_does(api: ApiServer, cluster: Cluster) -> None:
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
async def test_how_long_a_foreign_lease_lasts_is_not_believed_blindly(
    api: ApiServer, cluster: Cluster, lasts: object
) -> None:
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


async def test_a_lease_whose_counter_is_full_can_be_taken(api: ApiServer, cluster: Cluster) -> None:
    made = {"holderIdentity": "", "leaseTransitions": 2**31 - 1}
    api.create(LEASE, {"metadata": METADATA, "spec": made})
    assert await Candidate(cluster, lease_for("first")).take()
    assert spec(api)["leaseTransitions"] < 2**31


def holder(api: ApiServer) -> str:
    return str((api.find(LEASE, SERVES) or {"spec": {}})["spec"].get("holderIdentity"))


async def test_the_operator_of_the_cluster_leaves_a_namespace_alone_while_another_claims_it(
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
    assert told == f"namespace team is left alone: team/ours serves it (Lease {SERVES})"

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


async def test_what_it_claimed_itself_while_it_named_namespaces_is_its_own(cluster: Cluster) -> None:
    named, whole = Claims(cluster, ["team"], "system/ours"), Claims(cluster, [], "system/ours")
    await named.look()
    await whole.look()
    assert whole.serves("team")


async def test_a_claim_that_is_given_back_frees_the_namespace_at_once(api: ApiServer, cluster: Cluster) -> None:
    named, whole = Claims(cluster, ["team"], "team/ours"), Claims(cluster, [], "system/all")
    await named.look()
    await whole.look()
    assert not whole.serves("team")
    await named.release()
    assert holder(api) == ""
    await whole.look()
    assert whole.serves("team")


async def test_claims_that_nobody_takes_back_are_not_waited_for_at_the_end(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for the Lease waits for them, too: three seconds are over as soon as one does not answer."""
    loop = asyncio.get_running_loop()
    now_s = loop.time

    async def hangs(*_: Any) -> None:
        monkeypatch.setattr(loop, "time", lambda: now_s() + 3)
        await asyncio.Event().wait()

    monkeypatch.setattr(cluster, "get", hangs)
    async with asyncio.timeout(DEADLINE_S):
        await Claims(cluster, [f"team-{number}" for number in range(10)], "team/ours").release()


async def test_of_two_that_name_a_namespace_the_first_serves_it(api: ApiServer, cluster: Cluster) -> None:
    first, second = Claims(cluster, ["team"], "a/first"), Claims(cluster, ["team"], "b/second")
    await first.look()
    await second.look()
    assert (first.serves("team"), second.serves("team")) == (True, False)
    await second.release()
    assert holder(api) == "a/first"


async def test_what_cannot_be_told_changes_nothing(
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
    assert [message for message in caplog.messages if "cannot be told now" in message and "etcd is slow" in message]


async def test_at_its_end_claims_are_given_back_while_it_may_still_write(api: ApiServer) -> None:
    leadership = Leadership(lease_for("ours"), lambda _: None)
    leadership.start()
    state = OperatorState(Settings(namespaces=("team",), lease=lease_for("ours")), leadership)
    try:
        await state.start()
        await until(lambda: holder(api) == f"specdecode-system/{NAME}", lambda: "it leads, and claims its namespace")
    finally:
        await state.stop()
    assert holder(api) == ""


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
    "post_event": lambda cluster: cluster.post_event("team", {}),
    "try_create": lambda cluster: cluster.try_create(POD, BODY),
    "take_over_fields": lambda cluster: cluster.take_over_fields(BODY, ()),
}
READS = {"close", "connect", "get", "list", "pages"}


def test_every_call_is_known_as_a_read_or_a_write() -> None:
    assert {name for name in vars(Cluster) if not name.startswith("_")} == {*WRITES, *READS}


@pytest.mark.parametrize("name", WRITES)
async def test_without_the_lease_nothing_is_written(api: ApiServer, name: str) -> None:
    uid = api.create(SERVICE, {"metadata": LLAMA})["metadata"]["uid"]
    BODY["metadata"]["uid"] = uid
    cluster = await Cluster.connect(may_write=lambda: False)
    try:
        with pytest.raises(NotLeadingError, match="does not hold the Lease"):
            await WRITES[name](cluster)
        assert await cluster.get(SERVICE, "team", "llama") is not None
        assert await cluster.list(POD) is not None
    finally:
        await cluster.close()
    assert {request.split()[0] for request in api.requests} <= {"get", "list"}
