"""What the operator with a signing key writes of each rollout, and what it makes of what others write there."""

import json

import pytest

from specdecode_operator.attestation.envelope import opened
from specdecode_operator.attestation.keys import SigningKey
from specdecode_operator.attestation.statement import read_statement
from specdecode_operator.cluster.client import Cluster
from specdecode_operator.handlers.reconcile.reconciler import Reconciler
from specdecode_operator.kube.resources import CONFIG_MAP
from tests.support.api_server import ApiServer
from tests.support.attestations import key_pair
from tests.support.objects import tiny_cpu
from tests.unit.handlers.reconcile.reconciler_world import World

KEY = SigningKey.read(key_pair()[0])


@pytest.fixture
async def world(api: ApiServer, cluster: Cluster) -> World:
    world = World(api, cluster)
    world.reconciler = Reconciler(
        cluster, world.cache, world.probe, world.residuals, world.calibration, signing_key=KEY
    )
    return world


async def test_an_attestation_is_written_before_the_engines_and_then_rests(world: World) -> None:
    world.add(tiny_cpu())
    writes = await world.look()
    first, last = (
        next(i for i, each in enumerate(writes) if name in each) for name in ("-attestation", " deployments")
    )
    assert first < last, writes
    await world.look()
    assert not [each for each in await world.look() if "attestation" in each]


async def test_what_others_write_there_is_taken_away(world: World) -> None:
    world.add(tiny_cpu())
    await world.look()
    written = world.api.find(CONFIG_MAP, "llama-attestation")
    assert written is not None
    [(name, envelope)] = written["data"].items()
    assert read_statement(opened(envelope, KEY.public)).predicate.object.name == "llama"
    forged = json.dumps({**json.loads(envelope), "payload": "e30="})
    world.api.change(CONFIG_MAP, "llama-attestation", data={name: forged})
    await world.look()
    mended = world.api.find(CONFIG_MAP, "llama-attestation")
    assert mended is not None
    assert opened(mended["data"][name], KEY.public)
