"""One Lease is taken, renewed and given back by nobody who has not read it as it is."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdecode_operator.cluster.client import Cluster, ConflictError
from specdecode_operator.cluster.resources import LEASE
from specdecode_operator.handlers.leadership import Candidate
from tests.support.api_server import ApiServer
from tests.support.rights import role_rights
from tests.unit.handlers.leadership.test_leadership import LEASE_S, METADATA, NAME, Clock, lease_for, spec

ROOT = Path(__file__).parents[4]


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
