"""Reconcile an object whose changed spec is compared with the serving engines by a canary."""

import time
from dataclasses import replace
from unittest.mock import AsyncMock, Mock

import pytest

from specdecode_operator.cluster.resources import CONFIG_MAP, DEPLOYMENT, POD, SPECDECODE_DEPLOYMENT
from specdecode_operator.handlers import reconcile_deployment
from specdecode_operator.stats.pool_comparison import BLOCK_S
from specdecode_operator.vllm.engine_metrics import CanaryReading, EngineReading
from tests.support.objects import Body, tiny_cpu
from tests.unit.handlers.reconciler_world import World, pod_metadata
from tests.unit.vllm.test_engine_metrics import READING

READY = {"podIP": "127.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
ROLLOUT = {"strategy": "Canary"}


class Pools:
    """Both pools of an object: their pods, and the counters that they report block by block."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world, self.monkeypatch = world, monkeypatch
        self.looks = 0
        self.answers: CanaryReading | None = None
        """Answers of the canary to canary prompts."""

    async def begin(self) -> None:
        """Let an engine serve, and change the spec."""
        self.world.add(tiny_cpu(serving={"maxModelLen": 1024}, rollout=ROLLOUT))
        await self.world.look()
        self.start("llama", "llama-1")
        await self.look()
        self.change(serving={"maxModelLen": 512}, rollout=ROLLOUT)
        await self.look()

    def change(self, **fields: Body) -> None:
        """Write the spec."""
        generation = self.world.object["metadata"].get("generation", 1) + 1
        meta = {**self.world.object["metadata"], "generation": generation}
        self.world.api.change(SPECDECODE_DEPLOYMENT, "llama", spec=tiny_cpu(**fields), metadata=meta)

    def start(self, deployment: str, name: str) -> None:
        """Let a Deployment have a ready pod."""
        found = self.world.api.find(DEPLOYMENT, deployment) or {}
        meta = {**pod_metadata(found), "namespace": "team", "name": name}
        self.world.api.create(POD, {"metadata": meta, "status": READY})
        counts = dict.fromkeys(("replicas", "updatedReplicas", "availableReplicas"), 1)
        self.world.api.change(DEPLOYMENT, deployment, status={"observedGeneration": 9, **counts})

    async def look(self, slower: float = 1.0) -> list[str]:
        """Reconcile a minute later; the canary takes so much longer for each token."""
        canary = replace(self._reading(slower), canaries=self.answers)
        readings = {"llama-1": self._reading(1.0), "canary-1": canary}

        async def read(pods: list[Body], *_: object, **__: object) -> dict[str, EngineReading]:
            return {pod["metadata"]["name"]: readings[pod["metadata"]["name"]] for pod in pods}

        self.monkeypatch.setattr(self.world.probe, "read_all", AsyncMock(side_effect=read))
        now_s = self.looks * BLOCK_S
        self.monkeypatch.setattr(reconcile_deployment, "time", Mock(monotonic=Mock(return_value=now_s), time=time.time))
        self.looks += 1
        return await self.world.look()

    def _reading(self, slower: float) -> EngineReading:
        blocks = self.looks + 1
        return replace(
            READING,
            generation_tokens=8_040 * blocks,
            first_tokens=40 * blocks,
            first_token_seconds=8.0 * blocks,
            prompt_tokens=40_000 * blocks,
            decode_steps=4_000 * blocks,
            decode_seconds=80.0 * slower * blocks,
            finished_requests=40 * blocks,
            answered_requests=40 * blocks,
        )

    async def compare(self, blocks: int, slower: float = 1.0) -> None:
        """Start the canary, and let both pools serve a number of blocks."""
        self.start("llama-canary", "canary-1")
        for _ in range(blocks + 1):
            await self.look(slower)

    @property
    def names(self) -> list[str]:
        """Names of the Deployments."""
        return sorted(self.world.api.names(DEPLOYMENT))

    def model_len(self, deployment: str = "llama") -> int:
        """Return the length that a Deployment's engines are started with."""
        (container,) = (self.world.api.find(DEPLOYMENT, deployment) or {})["spec"]["template"]["spec"]["containers"]
        command = [*container.get("command", ()), *container.get("args", ())]
        return int(command[command.index("--max-model-len") + 1])


@pytest.fixture
async def pools(world: World, monkeypatch: pytest.MonkeyPatch) -> Pools:
    pools = Pools(world, monkeypatch)
    await pools.begin()
    return pools


async def test_canary_starts_beside_the_serving_engines(world: World, pools: Pools) -> None:
    assert pools.names == ["llama", "llama-canary"]
    assert (pools.model_len("llama"), pools.model_len("llama-canary")) == (1024, 512)
    assert world.said("Canary")[:2] == ("Unknown", "CanaryStarting")
    assert world.said("Available")[0] == "True"
    assert await pools.look() == [], "a second look changes nothing"


async def test_canary_that_is_not_worse_is_promoted(world: World, pools: Pools) -> None:
    await pools.compare(6)
    assert world.said("Canary")[:2] == ("Unknown", "CanaryComparing")
    assert world.object["status"]["canary"]["blocks"] == 6
    for _ in range(3):
        await pools.look()
    assert world.said("Canary")[:2] == ("True", "Promoted")
    await pools.look()
    assert pools.names == ["llama"]
    assert pools.model_len() == 512
    assert "Promoted" in world.told()
    await pools.look()
    assert world.object["status"]["canary"]["figures"][0]["verdict"] == "Holds"


async def test_worse_canary_is_removed_and_stays_failed_after_a_restart(world: World, pools: Pools) -> None:
    await pools.compare(9, slower=1.2)
    for _ in range(2):
        await pools.look(slower=1.2)
        assert world.said("Canary")[:2] == ("False", "CanaryFailed")
        assert world.said()[:2] == ("False", "RolledBack")
        assert pools.names == ["llama"]
        assert pools.model_len() == 1024
        world.restart()
    assert world.told().count("CanaryFailed") == 1


async def test_a_canary_with_wrong_answers_is_not_promoted(world: World, pools: Pools) -> None:
    pools.change(serving={"maxModelLen": 512}, rollout=ROLLOUT, policy={"canaries": {}})
    await pools.look()
    await pools.compare(1)
    assert world.said("Canary")[:2] == ("Unknown", "CanaryComparing")
    pools.answers = CanaryReading(right=9, wrong=4, wrong_prompts=2)
    await pools.look()
    assert world.said("Canary")[:2] == ("False", "CanaryFailed")
    assert "WrongAnswers" in world.said("Canary")[2]
    await pools.look()
    assert pools.names == ["llama"]
    assert pools.model_len() == 1024


async def test_operator_restart_restarts_the_comparison(world: World, pools: Pools) -> None:
    await pools.compare(5)
    world.restart()
    await pools.look()
    assert world.object["status"]["canary"]["blocks"] == 0
    await pools.look()
    assert world.object["status"]["canary"]["blocks"] == 1


async def test_promotion_survives_an_operator_restart(world: World, pools: Pools) -> None:
    await pools.compare(8)
    assert world.said("Canary")[:2] == ("True", "Promoted")
    world.restart()
    await pools.look()
    assert pools.model_len() == 512


async def test_forged_promotion_is_ignored(world: World, pools: Pools) -> None:
    await pools.compare(8)
    world.restart()
    data = (world.api.find(CONFIG_MAP, "llama-last-good") or {})["data"]
    forged = data["promotion.json"].replace("All figures", "Forged")
    world.api.change(CONFIG_MAP, "llama-last-good", data={**data, "promotion.json": forged})
    await pools.look()
    assert pools.model_len() == 1024
    assert "llama-canary" in pools.names


async def test_reverted_spec_ends_the_canary(world: World, pools: Pools) -> None:
    await pools.compare(3)
    pools.change(serving={"maxModelLen": 1024}, rollout=ROLLOUT)
    await pools.look()
    assert pools.names == ["llama"]
    assert world.said("Canary")[:2] == ("True", "NothingToCompare")
    assert "canary" not in world.object["status"]


async def test_suspension_ends_the_canary(world: World, pools: Pools) -> None:
    await pools.compare(3)
    pools.change(serving={"maxModelLen": 512}, rollout=ROLLOUT, suspend=True)  # type: ignore[arg-type]  a field
    await pools.look()
    assert pools.names == ["llama"]
    assert (world.api.find(DEPLOYMENT, "llama") or {})["spec"]["replicas"] == 0
    assert world.said("Canary")[:2] == ("Unknown", "CanaryWaits")


async def test_canary_name_of_other_owner_is_a_name_conflict(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    other = {"namespace": "team", "name": "llama-canary"}
    before = world.api.create(DEPLOYMENT, {"metadata": other, "spec": {}})
    pools = Pools(world, monkeypatch)
    await pools.begin()
    assert world.said()[1] == "ChildNameConflict"
    assert world.api.find(DEPLOYMENT, "llama-canary") == before
    assert pools.model_len() == 1024
