"""Of several operators each namespace is served by one."""

import asyncio
import logging
from typing import Any

import pytest

from specdecode_operator.cluster.client import Cluster
from specdecode_operator.cluster.resources import DEPLOYMENT, LEASE, SPECDECODE_DEPLOYMENT
from specdecode_operator.cluster.rights import SERVES
from specdecode_operator.handlers.leadership import CLAIM_S, Claims, Leadership
from specdecode_operator.handlers.operator_state import OperatorState
from specdecode_operator.handlers.settings import Settings
from tests.support.api_server import ApiServer
from tests.support.embedded_operator import embedded_operator, until
from tests.support.objects import tiny_cpu
from tests.support.waiting import DEADLINE_S
from tests.unit.handlers.leadership.test_leadership import NAME, Clock, lease_for


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


async def test_objects_of_a_namespace_that_another_serves_are_left_alone_until_it_is_gone(
    api: ApiServer, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdecode_operator.handlers.operator_state.RESYNC_S", 0.05)
    named = Claims(cluster, ["team"], "team/ours")
    await named.look()
    meta = {"namespace": "team", "name": "tiny"}
    api.create(SPECDECODE_DEPLOYMENT, {"metadata": meta, "spec": tiny_cpu()})
    async with embedded_operator(monkeypatch) as operator:
        asked = api.requests.count("list leases.coordination.k8s.io")
        await until(lambda: api.requests.count("list leases.coordination.k8s.io") > asked + 2, lambda: "it looks again")
        assert isinstance(operator.state, OperatorState)
        assert api.names(DEPLOYMENT) == []
        await named.release()
        await until(lambda: api.names(DEPLOYMENT) == ["tiny"], lambda: "it serves the namespace")


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
