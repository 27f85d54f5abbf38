"""Serve the head that a training offers: rollout, rollback and withdrawal, without a change of the spec."""

import json
from typing import Any

import pytest

from specdecode_operator.api import training
from specdecode_operator.attestation.keys import SigningKey
from specdecode_operator.attestation.statement import digest, opened, read_statement
from specdecode_operator.cluster.resources import CONFIG_MAP, DEPLOYMENT, POD, SPECDECODE_DEPLOYMENT
from tests.support.attestations import key_pair
from tests.support.objects import Body
from tests.support.offered_heads import HEAD_CONFIG, SHA256, asking, better_training, head
from tests.unit.handlers.reconciler_world import World
from tests.unit.handlers.test_forged_objects import fail, pod_spec

OTHER_SHA256 = "cd" * 32


def speculative_config(world: World) -> Body:
    command = pod_spec(world)["containers"][0]["command"]
    found: Body = json.loads(command[command.index("--speculative-config") + 1])
    return found


def draft(world: World) -> str:
    return str(speculative_config(world)["model"])


def said(world: World) -> str:
    return str(world.object["status"]["trainedDraft"]["reason"])


def in_force(world: World) -> Body:
    found: Body = world.object["status"]["trainedDraft"]
    return found


def offer(world: World, name: str = "chat", **changes: Any) -> None:
    """Let a watch report a training."""
    body = better_training(name, **changes)
    world.offers = getattr(world, "offers", 1) + 1  # type: ignore[attr-defined]
    body["metadata"]["resourceVersion"] = str(world.offers)  # type: ignore[attr-defined]
    world.cache.put_parent(training.KIND, body)


def withdraw(world: World, name: str = "chat") -> None:
    """Let a watch report that a training is gone."""
    world.cache.drop_parent(training.KIND, better_training(name), 10**6)


async def serve(world: World, **spec: Any) -> None:
    """Let the engines of a spec serve."""
    world.add(asking(**spec))
    await world.look()
    world.serve()
    await world.look()
    assert said(world) == "NoHeadOffered"


async def promote(world: World) -> None:
    """Let the engines of the offered head serve."""
    await world.look()
    world.serve(0)
    await world.look()
    world.serve()
    await world.look()


async def test_offered_head_replaces_the_draft_and_the_spec_stays(world: World) -> None:
    await serve(world)
    before = world.object["spec"]
    offer(world)
    await world.look()
    assert draft(world) == "/models/pair/draft", "the status names the head before anything is rolled out"
    assert in_force(world)["training"] == "chat"
    world.serve(0)
    await world.look()
    assert draft(world) == "/drafts/chat-training/team/chat/head"
    assert speculative_config(world)["method"] == "eagle3"
    assert said(world) == "RolloutInProgress"
    world.serve()
    await world.look()
    assert said(world) == "Promoted"
    named = in_force(world)
    assert (named["claim"], named["path"], named["sha256"]) == ("chat-training", "team/chat/head", SHA256)
    assert world.object["spec"] == before
    assert await world.look() == []


@pytest.mark.parametrize("way", ["Manual", "deleted", "NotBetter", "disabled", "other target"])
async def test_withdrawn_head_gives_way_to_the_draft_of_the_spec(world: World, way: str) -> None:
    await serve(world)
    offer(world)
    await promote(world)
    assert draft(world).startswith("/drafts/")
    spec = world.object["spec"]
    if way == "Manual":
        offer(world, spec={"promote": "Manual"})
    elif way == "deleted":
        withdraw(world)
    elif way == "NotBetter":
        offer(world, status={"conditions": []})
    elif way == "other target":
        spec["target"]["revision"] = None
        spec["target"]["quantization"] = "FP8"
        spec["target"]["config"] = {**spec["target"]["config"]}
        world.api.change(SPECDECODE_DEPLOYMENT, "llama", spec=spec)
    else:
        spec["speculation"]["trainedDrafts"] = False
        world.api.change(SPECDECODE_DEPLOYMENT, "llama", spec=spec)
    world.serve(0)
    await world.look()
    assert draft(world) == "/models/pair/draft"
    if way == "disabled":
        assert world.object["status"].get("trainedDraft") is None
    else:
        assert in_force(world).get("training") is None
        reason = "OtherTarget" if way == "other target" else "NoHeadOffered"
        assert said(world) == reason


async def test_head_waits_for_a_rollout_of_the_spec(world: World) -> None:
    await serve(world)
    world.api.change(SPECDECODE_DEPLOYMENT, "llama", spec=asking(serving={"maxModelLen": 512}))
    world.serve(0)
    offer(world)
    for _ in range(2):
        await world.look()
        assert said(world) == "RolloutInProgress"
        assert in_force(world).get("training") is None
    assert draft(world) == "/models/pair/draft"
    world.serve()
    await world.look()
    assert in_force(world)["training"] == "chat"


async def test_newer_head_waits_for_the_rollout_of_an_older_one(world: World) -> None:
    await serve(world)
    offer(world, "old")
    await world.look()
    world.serve(0)
    await world.look()
    offer(world, "new", created="2026-02-01T00:00:00Z")
    for _ in range(2):
        await world.look()
        assert in_force(world)["training"] == "old"
    world.serve()
    await world.look()
    assert in_force(world)["training"] == "new"
    await promote(world)
    assert draft(world) == "/drafts/new-training/team/new/head"
    withdraw(world, "new")
    await promote(world)
    assert draft(world) == "/drafts/old-training/team/old/head"


async def test_head_whose_engines_fail_is_rolled_back_and_not_offered_again(world: World) -> None:
    await serve(world)
    offer(world)
    await world.look()
    world.serve(0)
    await world.look()
    fail(world)
    for _ in range(3):
        await world.look()
    assert draft(world) == "/models/pair/draft"
    assert said(world) == "RolledBack"
    assert len(in_force(world)["failed"]) == 1
    world.api.remove(POD, "llama-broken")
    world.serve()
    for _ in range(3):
        await world.look()
        assert draft(world) == "/models/pair/draft"
        assert world.said("Ready")[1] == "Serving"
        assert said(world) == "RolledBack"
    world.restart()
    offer(world)
    for _ in range(2):
        await world.look()
    assert draft(world) == "/models/pair/draft", "the status remembers it"
    offer(world, status={"head": head(sha256=OTHER_SHA256)})
    await promote(world)
    assert (draft(world), in_force(world)["sha256"]) == ("/drafts/chat-training/team/chat/head", OTHER_SHA256)


async def test_another_head_in_the_same_folder_is_rolled_out(world: World) -> None:
    await serve(world)
    offer(world)
    await promote(world)
    (before,) = world.all(DEPLOYMENT)
    offer(world, status={"head": head(sha256=OTHER_SHA256)})
    await world.look()
    await promote(world)
    (after,) = world.all(DEPLOYMENT)
    assert draft(world) == "/drafts/chat-training/team/chat/head"
    assert after["spec"]["template"] != before["spec"]["template"]


async def test_head_that_does_not_fit_the_target_is_refused(world: World) -> None:
    await serve(world)
    layers = {**HEAD_CONFIG["transformer_layer_config"], "vocab_size": 2048}
    offer(world, status={"head": head(config={**HEAD_CONFIG, "transformer_layer_config": layers})})
    for _ in range(2):
        await world.look()
        assert said(world) == "HeadRefused"
        assert world.said()[1] == "Serving"
    assert draft(world) == "/models/pair/draft"


async def test_status_of_a_training_cannot_choose_a_mount(world: World) -> None:
    await serve(world)
    for forged in ({"claim": "secrets"}, {"head": head(path="../../etc")}, {"head": head(path="/etc")}):
        offer(world, status=forged)
        for _ in range(2):
            await world.look()
        assert said(world) == "HeadInvalid"
        assert draft(world) == "/models/pair/draft"


async def test_forged_status_of_the_deployment_serves_no_head(world: World) -> None:
    await serve(world)
    status = {**world.object["status"], "trainedDraft": {"training": "chat", "claim": "secrets", "path": "/etc"}}
    world.api.change(SPECDECODE_DEPLOYMENT, "llama", status=status)
    await world.look()
    assert draft(world) == "/models/pair/draft"
    assert in_force(world).get("claim") is None


async def test_attestation_names_the_head(world: World) -> None:
    key = SigningKey.read(key_pair()[0])
    world.restart(signing_key=key)
    await serve(world)
    offer(world)
    await promote(world)
    written = world.api.find(CONFIG_MAP, "llama-attestation") or {}
    told = [read_statement(opened(each, key.public)).predicate.object for each in written["data"].values()]
    assert {each.trained_draft_sha256 for each in told} == {None, SHA256}
    assert {each.spec_sha256 for each in told} == {digest(world.object["spec"])}
