"""LoRA adapters of imported servers."""

from typing import Any

import pytest

from specdecode_operator.importing.convert import Migration
from tests.support.migrations import migrate
from tests.unit.cli.old_deployments import LLAMA_8B, engine

LORA = ("--enable-lora", "--lora-modules")
CLAIM = {"name": "held", "persistentVolumeClaim": {"claimName": "loras"}}


def imported(*flags: str, volume: dict[str, Any] | None = None, model: str = LLAMA_8B) -> Migration:
    """Import an engine that mounts a volume at /held."""
    mounts = [{"name": "held", "mountPath": "/held"}] if volume else []
    body = engine(model, *flags, volumeMounts=mounts)
    if volume:
        body["spec"]["template"]["spec"]["volumes"] = [volume]
    return migrate(body)


def test_adapter_of_the_hub_becomes_an_adapter() -> None:
    spec = imported(*LORA, "sql=owner/sql", "--max-lora-rank", "32").body["spec"]
    assert spec["adapters"] == [{"name": "sql", "model": "owner/sql", "rank": 32}]
    assert "extraArgs" not in spec.get("engine", {})


def test_adapter_on_a_claim_keeps_its_claim_and_needs_no_mount() -> None:
    migration = imported(*LORA, '{"name": "sql", "path": "/held/a/sql"}', volume=CLAIM)
    assert not migration.decisions
    spec = migration.body["spec"]
    assert spec["adapters"] == [
        {"name": "sql", "model": "a/sql", "rank": 16, "persistentVolumeClaim": {"claimName": "loras"}}
    ]
    assert "podTemplate" not in spec


def test_adapter_beside_a_model_on_the_same_claim_has_no_own_claim() -> None:
    spec = imported(*LORA, "sql=/held/sql", volume=CLAIM, model="/held/target").body["spec"]
    assert spec["adapters"] == [{"name": "sql", "model": "sql", "rank": 16}]
    assert spec["models"]["volume"] == {"persistentVolumeClaim": {"claimName": "loras"}}


@pytest.mark.parametrize(
    ("path", "volume", "model"),
    [
        ("/loras/sql", None, LLAMA_8B),
        ("./sql", None, LLAMA_8B),
        ("/held/sql", {"name": "held", "configMap": {"name": "x"}}, LLAMA_8B),
        ("/held/sql", {"name": "held", "hostPath": {"path": "/srv"}}, LLAMA_8B),
        ("owner/sql", CLAIM, "/held/target"),
    ],
    ids=["in the image", "relative", "on a ConfigMap", "in a directory of the node", "of the hub beside a volume"],
)
def test_adapter_that_engines_could_not_have_is_a_decision(
    path: str, volume: dict[str, Any] | None, model: str
) -> None:
    decisions = imported(*LORA, f"sql={path}", volume=volume, model=model).decisions
    assert [each.value for each in decisions if each.field == "spec.adapters[0].model"] == [path]


@pytest.mark.parametrize(
    ("flags", "slots"),
    [
        ((), {"gpu": 1, "host": 1}),
        (("--max-loras", "2"), None),
        (("--max-loras", "2", "--max-cpu-loras", "8"), {"host": 8}),
        (("--max-loras", "3"), {"gpu": 3}),
    ],
)
def test_slots_stay_as_they_were(flags: tuple[str, ...], slots: dict[str, int] | None) -> None:
    spec = imported(*LORA, "a=owner/a", "b=owner/b", *flags).body["spec"]
    assert spec.get("adapterSlots") == slots


def test_target_modules_become_those_of_each_adapter() -> None:
    spec = imported(*LORA, "a=owner/a", "--lora-target-modules", "q_proj", "v_proj").body["spec"]
    assert spec["adapters"][0]["targetModules"] == ["q_proj", "v_proj"]


def test_server_without_adapters_at_start_keeps_its_flags() -> None:
    spec = imported("--enable-lora", "--max-loras", "4").body["spec"]
    assert spec["engine"]["extraArgs"] == ["--enable-lora", "--max-loras", "4"]
    assert "adapters" not in spec
