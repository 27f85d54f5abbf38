"""Attestations that the reconciler writes for each rollout."""

import json
from unittest.mock import AsyncMock

import pytest

from specdecode_operator.cluster.client import Cluster
from specdecode_operator.cluster.resources import CONFIG_MAP, SPECDECODE_CAPTURE, SPECDECODE_DEPLOYMENT
from specdecode_operator.deployment.attestation.keys import PublicKey, SigningKey
from specdecode_operator.deployment.attestation.statement import opened, read_statement
from tests.support.api_server import ApiServer
from tests.support.attestations import IMAGE_DIGEST, key_pair
from tests.support.objects import tiny_cpu
from tests.unit.deployment.test_speculation_in_force import counting
from tests.unit.handlers.reconciler_world import World
from tests.unit.handlers.resync_rounds import LLAMA

KEY = SigningKey.read(key_pair()[0])


@pytest.fixture
async def world(api: ApiServer, cluster: Cluster) -> World:
    world = World(api, cluster)
    start(world, cluster, KEY)
    return world


def start(world: World, cluster: Cluster, key: SigningKey) -> None:
    """Let an operator with this key take over."""
    world.restart(signing_key=key)


def signed(world: World) -> dict[str, str]:
    """Return the entries of the ConfigMap."""
    written = world.api.find(CONFIG_MAP, "llama-attestation")
    assert written is not None
    return dict(written["data"])


@pytest.fixture
async def two_rollouts(world: World) -> dict[str, str]:
    """The entries of two rollouts, the current one last."""
    world.add(tiny_cpu())
    await world.look()
    [earlier] = signed(world)
    world.api.change(SPECDECODE_DEPLOYMENT, "llama", spec=tiny_cpu(serving={"maxModelLen": 512}))
    await world.look()
    entries = signed(world)
    assert len(entries) == 2
    return {earlier: entries.pop(earlier), **entries}


async def test_new_key_signs_attestations_of_the_former_key_again(
    world: World, cluster: Cluster, two_rollouts: dict[str, str]
) -> None:
    new = SigningKey.read(key_pair()[0], former=(PublicKey.read(key_pair()[1]), KEY.public))
    start(world, cluster, new)
    await world.look()
    after = signed(world)
    assert {name: opened(each, new.public) for name, each in after.items()} == {
        name: opened(each, KEY.public) for name, each in two_rollouts.items()
    }
    await world.look()
    assert signed(world) == after, "it is signed once"


@pytest.mark.parametrize("is_believed", [True, False])
async def test_new_key_drops_earlier_attestations_without_trusted_signature(
    world: World, cluster: Cluster, two_rollouts: dict[str, str], *, is_believed: bool
) -> None:
    earlier, current = two_rollouts
    if is_believed:  # and what is there is forged
        payload = json.loads(two_rollouts[current])["payload"]
        forged = json.dumps({**json.loads(two_rollouts[earlier]), "payload": payload})
        world.api.change(CONFIG_MAP, "llama-attestation", data={**two_rollouts, earlier: forged})
    new = SigningKey.read(key_pair()[0], former=(KEY.public,) if is_believed else ())
    start(world, cluster, new)
    await world.look()
    [(name, envelope)] = signed(world).items()
    assert name == current
    assert opened(envelope, new.public)


async def test_capture_verdict_is_added_to_the_attestation(world: World, engine_port: int) -> None:
    world.add(tiny_cpu(serving={"maxModelLen": 1024, "port": engine_port}))
    await world.look()
    ready = {"podIP": "127.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
    image = {"name": "engine", "imageID": f"r@{IMAGE_DIGEST}", "ready": True}
    world.start_engines(**ready, containerStatuses=[image])
    world.serve()
    for _ in range(4):
        await world.look()
    [(name, envelope)] = signed(world).items()
    before = read_statement(opened(envelope, KEY.public)).predicate.served
    assert before is not None
    assert before.verdict is None
    pays = {"type": "Pays", "status": "True", "reason": "Pays", "message": "it pays"}
    metadata = {"namespace": "team", "name": "demo", "uid": "demo", "resourceVersion": "1", "generation": 1}
    status = {"finishedAt": "2026-01-01T00:00:00Z", "conditions": [pays]}
    demo = {"metadata": metadata, "spec": {"deployment": "llama"}, "status": status}
    world.cache.put_parent(SPECDECODE_CAPTURE.kind, demo)
    await world.look()
    after = read_statement(opened(signed(world)[name], KEY.public)).predicate.served
    assert after is not None
    assert after.verdict is not None
    assert after.verdict.capture == "demo"


async def test_engines_that_serve_are_attested_at_the_next_event(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attestation needs the status that the previous reconcile has written."""
    world.add(tiny_cpu())
    await world.look()
    image = {"name": "engine", "imageID": f"r@{IMAGE_DIGEST}", "ready": True}
    ready = [{"type": "Ready", "status": "True"}]
    world.start_engines(podIP="127.0.0.1", conditions=ready, containerStatuses=[image])
    world.serve()
    monkeypatch.setattr(world.probe, "read_all", AsyncMock(return_value={"llama-1": counting(600, 600)}))
    assert "patch configmaps llama-attestation" not in await world.look()
    world.see()
    assert world.reconciler.needs_reconcile(LLAMA)
    assert "patch configmaps llama-attestation" in await world.look()
