"""Replace the trained head of serving engines without a restart: one engine at a time, with a way back."""

import json
from typing import Any

import pytest

from specdecode_operator.api import training
from specdecode_operator.cluster.resources import CONFIG_MAP, DEPLOYMENT, POD, SPECDECODE_DEPLOYMENT
from specdecode_operator.deployment.attestation.keys import SigningKey
from specdecode_operator.deployment.attestation.statement import opened, read_statement
from specdecode_operator.deployment.live_recorder import DRAFT_ENTRY, HEAD_LOADER
from specdecode_operator.vllm.engine_metrics import EngineReading, HeadUpdate
from tests.support.attestations import key_pair
from tests.support.better_trainings import HEAD_CONFIG, asking, better_training, head
from tests.support.objects import Body
from tests.unit.handlers.reconciler_world import World

SHARED: Body = {"persistentVolumeClaim": {"claimName": "heads"}}
OLD, NEW, NEWEST = "0a" * 32, "0b" * 32, "0c" * 32


class Engines:
    """Two engines with sidecars that follow orders, and a deployment that asks for updates in place."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world, self.monkeypatch = world, monkeypatch
        self.heads: dict[str, HeadUpdate] = {}
        self.offered = 1

    async def begin(self, **spec: Any) -> None:
        """Serve the head of training old, after a rollout."""
        self.world.add(in_place(**spec))
        await self.look()
        self.roll_out()
        await self.look()
        self.offer("old", OLD)
        await self.look()
        await self.look()
        self.roll_out()
        await self.look()

    def offer(self, name: str, sha256: str, *, config: Body | None = None, claim: str = "heads") -> None:
        """Let a watch report a training with a better head."""
        body = better_training(
            name,
            created=f"2026-01-{self.offered:02}T00:00:00Z",
            spec={"storage": {"persistentVolumeClaim": {"claimName": claim}}},
            status={"claim": claim, "head": head(name, sha256=sha256, config=config or HEAD_CONFIG)},
        )
        self.offered += 1
        body["metadata"]["resourceVersion"] = str(self.offered)
        self.world.cache.put_parent(training.KIND, body)

    def withdraw(self, name: str) -> None:
        self.world.cache.drop_parent(training.KIND, better_training(name), 10**6)

    def roll_out(self) -> None:
        """Let the Deployment's controller replace all pods."""
        for pod in self.world.all(POD):
            self.world.api.remove(POD, pod["metadata"]["name"])
        self.heads.clear()
        for name in ("llama-1", "llama-2"):
            self.world.start_engines(name)
        self.world.serve(2)

    async def look(self) -> None:
        """Reconcile once."""

        async def read(pods: list[Body], *_: object, **__: object) -> dict[str, EngineReading]:
            return {
                name: EngineReading(*(None,) * 5, 0, 0, 0, head_update=self.heads.get(name))
                for name in (pod["metadata"]["name"] for pod in pods)
            }

        self.monkeypatch.setattr(self.world.probe, "read_all", read)
        await self.world.look()

    async def follow(self, **results: str) -> None:
        """Let each sidecar follow its order, with the results by name of the pod, and reconcile."""
        for pod in self.world.all(POD):
            name = pod["metadata"]["name"]
            ordered = self.order
            if ordered is not None and (ordered["pods"] is None or name in ordered["pods"]):
                result = results.get(name.replace("-", "_"), "kept")
                self.heads[name] = HeadUpdate(ordered["sha256"], result, f"it {result}", 0.2)
        await self.look()
        await self.look()

    @property
    def order(self) -> Body | None:
        """The head in draft.json."""
        body = self.world.api.find(CONFIG_MAP, "llama-plan") or {}
        text = (body.get("data") or {}).get(DRAFT_ENTRY)
        return None if text is None else dict(json.loads(text)["heads"][0])

    @property
    def told(self) -> Body:
        """status.trainedDraft."""
        found: Body = self.world.object["status"]["trainedDraft"]
        return found

    def said(self) -> tuple[str | None, str | None, str | None]:
        """Head in force, its reason, and how engines get it."""
        return self.told.get("training"), self.told["reason"], self.told.get("update")

    @property
    def template(self) -> Body:
        (deployment,) = self.world.all(DEPLOYMENT)
        found: Body = deployment["spec"]["template"]
        return found

    def starts_with(self, name: str) -> bool:
        return f"/drafts/heads/team/{name}/head" in json.dumps(self.template)


def in_place(**spec: Any) -> Body:
    body = asking(**spec)
    body["speculation"]["draftUpdate"] = "InPlace"
    return {"replicas": 2, **body}


@pytest.fixture
def engines(world: World, monkeypatch: pytest.MonkeyPatch) -> Engines:
    return Engines(world, monkeypatch)


async def test_first_head_is_rolled_out_by_engines_with_the_extension(engines: Engines) -> None:
    await engines.begin()
    assert engines.said() == ("old", "Promoted", "Restart")
    assert f"--worker-extension-cls={HEAD_LOADER}" in engines.template["spec"]["containers"][0]["command"]
    assert engines.starts_with("old")
    assert engines.order is None


async def test_next_head_reaches_one_engine_after_the_other_without_another_template(engines: Engines) -> None:
    await engines.begin()
    template = engines.template
    engines.offer("new", NEW)
    for pods in (["llama-1"], ["llama-1", "llama-2"]):
        await engines.look()
        await engines.look()
        assert engines.said() == ("new", "RolloutInProgress", "InPlace")
        order = {"root": "/drafts/heads", "path": "team/new/head", "sha256": NEW, "pods": pods}
        assert engines.order == order
        await engines.follow()
    assert engines.said() == ("new", "Promoted", "InPlace")
    assert engines.order is not None
    assert engines.order["pods"] is None
    assert (engines.told["startTraining"], engines.told["startSha256"]) == ("old", OLD)
    assert "2 of 2" in engines.told["updateMessage"]
    assert engines.template == template
    assert await engines.world.look() == []


async def test_engine_that_starts_later_gets_the_head_in_force(engines: Engines) -> None:
    await engines.begin()
    engines.offer("new", NEW)
    for _ in range(4):
        await engines.follow()
    engines.roll_out()
    await engines.look()
    assert engines.said() == ("new", "Promoted", "InPlace")
    assert "0 of 2" in engines.told["updateMessage"]
    await engines.follow()
    assert "2 of 2" in engines.told["updateMessage"]


@pytest.mark.parametrize("result", ["refused", "failed"])
async def test_engines_are_restarted_if_one_does_not_load_the_head(engines: Engines, result: str) -> None:
    await engines.begin()
    engines.offer("new", NEW)
    await engines.look()
    await engines.look()
    engines.heads["llama-1"] = HeadUpdate(NEW, result, f"it {result}", 0.0)
    await engines.look()
    engines.world.serve(0)
    await engines.look()
    assert engines.said() == ("new", "RolloutInProgress", "Restart")
    assert f"pod llama-1: {result}: it {result}" in engines.told["updateMessage"]
    assert engines.starts_with("new")
    assert engines.order is None
    assert "startTraining" not in engines.told
    engines.roll_out()
    await engines.look()
    assert engines.said() == ("new", "Promoted", "Restart")


async def test_engines_are_restarted_if_one_does_not_report(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    await engines.begin()
    engines.offer("new", NEW)
    await engines.look()
    await engines.look()
    await engines.follow()
    assert engines.said()[2] == "InPlace"
    monkeypatch.setattr("specdecode_operator.training.promotion.TIME_PER_ENGINE_S", -1.0)
    await engines.look()
    assert engines.said() == ("new", "RolloutInProgress", "Restart")
    assert "llama-2 has not reported" in engines.told["updateMessage"]


async def test_head_with_wrong_answers_is_withdrawn_and_the_earlier_one_returns(engines: Engines) -> None:
    await engines.begin()
    template = engines.template
    engines.offer("new", NEW)
    await engines.look()
    await engines.look()
    await engines.follow()
    assert engines.heads["llama-1"].sha256 == NEW
    await engines.follow(llama_1="kept", llama_2="reverted")
    assert engines.said() == ("old", "RolledBack", "InPlace")
    assert "pod llama-2" in engines.told["message"]
    for _ in range(4):
        await engines.follow()
    assert {each.sha256 for each in engines.heads.values()} == {OLD}
    assert engines.said() == ("old", "Promoted", "InPlace")
    assert len(engines.told["failed"]) == 1
    assert engines.template == template
    for _ in range(2):
        await engines.look()
    assert engines.said()[0] == "old", "the head that failed is not offered again"


async def test_withdrawn_head_gives_way_to_the_earlier_one_without_a_restart(engines: Engines) -> None:
    await engines.begin()
    template = engines.template
    engines.offer("new", NEW)
    for _ in range(4):
        await engines.follow()
    engines.withdraw("new")
    for _ in range(4):
        await engines.follow()
    assert engines.said() == ("old", "Promoted", "InPlace")
    assert {each.sha256 for each in engines.heads.values()} == {OLD}
    assert engines.template == template


async def test_engines_restart_with_the_head_in_force_if_their_first_one_is_gone(engines: Engines) -> None:
    await engines.begin()
    engines.offer("new", NEW)
    for _ in range(4):
        await engines.follow()
    engines.withdraw("old")
    await engines.look()
    await engines.look()
    assert engines.starts_with("new")
    assert engines.said()[2] == "Restart"
    assert engines.order is None


async def test_third_head_waits_until_all_engines_have_the_second(engines: Engines) -> None:
    await engines.begin()
    engines.offer("new", NEW)
    await engines.look()
    await engines.look()
    engines.offer("newest", NEWEST)
    await engines.follow()
    assert engines.said()[0] == "new"
    for _ in range(6):
        await engines.follow()
    assert engines.said() == ("newest", "Promoted", "InPlace")
    assert engines.starts_with("old")


@pytest.mark.parametrize(
    ("spec", "changes", "why"),
    [
        ({}, {"claim": "other"}, "claim"),
        ({}, {"config": {**HEAD_CONFIG, "norm_before_residual": False}}, "config"),
        ({"engine": {"recorder": False}}, {}, "spec.engine.recorder"),
        ({"engine": {"extraArgs": ["--worker-extension-cls=own.Extension"]}}, {}, "--worker-extension-cls"),
    ],
)
async def test_engines_are_restarted_if_an_update_in_place_is_impossible(
    engines: Engines, spec: Body, changes: Body, why: str
) -> None:
    await engines.begin(**({**spec, "engine": asking()["engine"] | spec["engine"]} if "engine" in spec else spec))
    engines.offer("new", NEW, **changes)
    await engines.look()
    assert engines.said() == ("new", "RolloutInProgress", "Restart")
    assert why in engines.told["updateMessage"]


async def test_config_may_differ_in_how_the_head_was_made(engines: Engines) -> None:
    await engines.begin()
    made = {**HEAD_CONFIG, "transformers_version": "6.0.0", "speculators_config": {"algorithm": "eagle3"}}
    engines.offer("new", NEW, config=made)
    await engines.look()
    assert engines.said()[2] == "InPlace"


async def test_restarted_operator_keeps_the_order(engines: Engines) -> None:
    await engines.begin()
    engines.offer("new", NEW)
    for _ in range(4):
        await engines.follow()
    before = engines.order
    engines.world.begin()
    await engines.look()
    assert engines.order == before
    assert engines.said() == ("new", "Promoted", "InPlace")


async def test_order_stays_while_models_of_a_new_spec_are_downloaded(engines: Engines) -> None:
    await engines.begin()
    engines.offer("new", NEW)
    for _ in range(4):
        await engines.follow()
    before = engines.order
    cache = {"volume": None, "cache": {"persistentVolumeClaim": {"claimName": "cache"}}}
    spec = {**engines.world.object["spec"], "models": cache}
    engines.world.api.change(SPECDECODE_DEPLOYMENT, "llama", spec=spec)
    for _ in range(3):
        await engines.look()
        assert engines.world.said()[1] == "DownloadingModels"
        assert engines.order == before
    assert before is not None


async def test_attestation_names_the_head_that_engines_got_in_place(engines: Engines) -> None:
    key = SigningKey.read(key_pair()[0])
    engines.world.restart(signing_key=key)
    await engines.begin()
    engines.offer("new", NEW)
    for _ in range(4):
        await engines.follow()
    written = engines.world.api.find(CONFIG_MAP, "llama-attestation") or {}
    told = [read_statement(opened(each, key.public)).predicate.object for each in written["data"].values()]
    assert NEW in {each.trained_draft_sha256 for each in told}
