"""Of several operators one works: the thread that holds the Lease meanwhile, and what is told of it."""

import asyncio
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from typer.testing import CliRunner

from devcluster.cluster.settings import free_ports
from specdecode_operator.cli.main import app
from specdecode_operator.cluster.resources import LEASE
from specdecode_operator.handlers import leadership, main
from specdecode_operator.handlers.leadership import Candidate, LeaderCollector, Leadership, LeaseName
from specdecode_operator.handlers.operator_state import OperatorState
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


async def test_a_lease_of_six_seconds_is_asked_for_each_second_however_long_answers_take(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, asked_s = Clock(), list[float]()

    class MadeUpWaits:
        """Waits end at once, on a clock that has gone on; after five looks they are real ones."""

        @staticmethod
        async def wait_for(what: Any, wait_s: float) -> Any:
            if len(asked_s) < 5:
                clock.now_s += wait_s
                wait_s = 0.0
            return await asyncio.wait_for(what, wait_s)

        def __getattr__(self, name: str) -> Any:
            return getattr(asyncio, name)

    async def take(*_: object, **__: object) -> bool:
        asked_s.append(clock.now_s)
        clock.now_s += 0.25
        return True

    monkeypatch.setattr(leadership, "_now_s", clock)
    monkeypatch.setattr(leadership, "asyncio", MadeUpWaits())
    monkeypatch.setattr(Candidate, "take", take)
    thread = Leadership(lease_for("first", duration_s=6), lambda _: None)
    thread.start()
    try:
        await until(lambda: len(asked_s) >= 5, lambda: f"it asks: {asked_s}")
    finally:
        await asyncio.to_thread(thread.stop)
    assert asked_s[:5] == [1000, 1001, 1002, 1003, 1004]


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
