"""LoRA adapters in engine pods, plans and notes."""

import json
from typing import Any

import pytest

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.cluster.nodes import NodeFacts
from specdecode_operator.deployment.desired_state import Launch
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.deployment.validation import valid_facts
from specdecode_operator.deployment.warnings import plan_notes
from specdecode_operator.problems import InvalidSpecError
from tests.support.decisions import desired_state
from tests.support.model_caches import decide, jobs, template
from tests.support.model_caches import pod as said_by
from tests.support.objects import H200, Body, pair_70b, parent, tiny_cpu

NODES = (NodeFacts("h200-0", H200, 8),)
SQL: Body = {"name": "sql", "model": "org/sql", "rank": 12}
LAW: Body = {"name": "law", "model": "org/law", "rank": 30}
CACHE = {"cache": {"persistentVolumeClaim": {"claimName": "hub"}}}


def on_claim(name: str, claim: str, **more: Any) -> Body:
    return {"name": name, "model": f"loras/{name}", "rank": 8, "persistentVolumeClaim": {"claimName": claim}, **more}


def pod_of(spec: Body) -> Body:
    return template(desired_state(parse_deployment(parent(spec)), NODES))


def words_of(pod: Body) -> list[str]:
    (engine,) = (each for each in pod["containers"] if each["name"] == "engine")
    words: list[str] = engine["command"]
    return words


def after(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def paths(words: list[str]) -> dict[str, str]:
    start = words.index("--lora-modules") + 1
    values = [json.loads(word) for word in words[start:] if word.startswith("{")]
    return {each["name"]: each["path"] for each in values}


def test_flags_follow_from_the_adapters() -> None:
    words = words_of(pod_of(pair_70b(adapters=[SQL, LAW])))
    assert "--enable-lora" in words
    assert [after(words, flag) for flag in ("--max-loras", "--max-lora-rank", "--max-cpu-loras")] == ["2", "32", "2"]
    assert paths(words) == {"sql": "/models/org/sql", "law": "/models/org/law"}
    assert "--lora-target-modules" not in words


def test_slots_replace_the_defaults() -> None:
    slots = {"gpu": 1, "host": 8, "maxRank": 64}
    words = words_of(pod_of(pair_70b(adapters=[SQL, LAW], adapterSlots=slots)))
    assert [after(words, flag) for flag in ("--max-loras", "--max-lora-rank", "--max-cpu-loras")] == ["1", "64", "8"]


def test_layers_are_restricted_only_if_all_adapters_name_them() -> None:
    named = [SQL | {"targetModules": ["v_proj"]}, LAW | {"targetModules": ["q_proj", "v_proj"]}]
    words = words_of(pod_of(pair_70b(adapters=named)))
    assert words[words.index("--lora-target-modules") + 1 :][:2] == ["q_proj", "v_proj"]
    assert "--lora-target-modules" not in words_of(pod_of(pair_70b(adapters=[named[0], LAW])))


def test_pods_download_adapters_like_models() -> None:
    init = pod_of(pair_70b(adapters=[SQL, LAW | {"revision": "v2"}]))["initContainers"]
    commands = {each["name"]: each["command"] for each in init}
    assert commands["download-adapter-0"] == ["hf", "download", "org/sql", "--local-dir", "/models/org/sql"]
    assert commands["download-adapter-1"][-1] == "--revision=v2"


def test_cache_downloads_adapters_once_and_engines_serve_their_commits() -> None:
    spec = pair_70b(models=CACHE, adapters=[SQL])
    wanted = jobs(decide(spec))
    assert len(wanted) == 3
    commits = [said_by(job, json.dumps({"commit": f"{number:040x}"})) for number, job in enumerate(wanted, start=1)]
    found = paths(words_of(template(decide(spec, commits))))
    assert found == {"sql": f"/models/hub/models--org--sql/snapshots/{3:040x}"}


def test_claims_are_mounted_once() -> None:
    spec = pair_70b(adapters=[on_claim("a", "one"), on_claim("b", "one"), on_claim("c", "two")])
    pod = pod_of(spec)
    assert paths(words_of(pod))["c"] == "/adapters/two/loras/c"
    claims = [each["persistentVolumeClaim"]["claimName"] for each in pod["volumes"] if "persistentVolumeClaim" in each]
    assert sorted(claims) == ["one", "two"]
    mounts = [each for each in pod["containers"][0]["volumeMounts"] if each["mountPath"].startswith("/adapters/")]
    assert len(mounts) == 2
    assert all(each["readOnly"] for each in mounts)


def test_claim_of_draft_and_adapter_is_one_volume() -> None:
    spec = tiny_cpu(adapters=[on_claim("a", "heads")])
    spec["speculation"]["draft"] |= {"persistentVolumeClaim": {"claimName": "heads"}}
    pod = pod_of(spec)
    named = [each for each in pod["volumes"] if each.get("persistentVolumeClaim", {}).get("claimName") == "heads"]
    assert len(named) == 1
    mounts = {each["mountPath"]: each["name"] for each in pod["containers"][0]["volumeMounts"]}
    assert mounts["/drafts/heads"] == mounts["/adapters/heads"] == named[0]["name"]


def test_adapters_lower_the_kv_cache_and_are_in_the_status() -> None:
    def plan_of(spec: Body) -> Any:
        outcome = desired_state(parse_deployment(parent(spec)), NODES).outcome
        assert isinstance(outcome, Launch)
        return outcome.plan.chosen.budget

    plain, adapted = plan_of(pair_70b()), plan_of(pair_70b(adapters=[SQL, LAW]))
    assert plain.adapters_bytes == 0 < adapted.adapters_bytes
    assert adapted.kv_cache_tokens < plain.kv_cache_tokens


def problems(spec: Body) -> dict[str, str]:
    with pytest.raises(InvalidSpecError) as raised:
        valid_facts(SpecDecodeDeploymentSpec.parse(spec))
    return {problem.field: problem.message for problem in raised.value.problems}


def test_adaptive_verification_is_rejected_with_adapters() -> None:
    speculation = {"method": "dspark", "numSpeculativeTokens": 5, "adaptiveVerification": True}
    spec = {"target": {"model": "deepseek-ai/DeepSeek-V4-Flash-0731"}, "speculation": speculation, "adapters": [SQL]}
    assert "spec.adapters" in problems(spec)["spec.speculation.adaptiveVerification"]


def test_class_without_adapters_is_rejected_in_both_places() -> None:
    spec: Body = {"target": {"model": "stepfun-ai/Step-3.5-Flash"}, "serving": {"maxModelLen": 8192}}
    assert "does not support LoRA" in problems({**spec, "adapters": [SQL]})["spec.adapters"]
    flag = {"extraArgs": ["--enable-lora"]}
    assert "does not support LoRA" in problems({**spec, "engine": flag})["spec.engine.extraArgs[0]"]


def test_inkling_needs_a_variable_for_adapters() -> None:
    spec: Body = {"target": {"model": "thinkingmachines/Inkling"}, "serving": {"maxModelLen": 8192}}
    assert "INKLING_MULTIMEM_AR=0" in problems({**spec, "adapters": [SQL]})["spec.adapters"]
    env = [{"name": "INKLING_MULTIMEM_AR", "value": "0"}]
    valid_facts(SpecDecodeDeploymentSpec.parse({**spec, "adapters": [SQL], "engine": {"env": env}}))


def test_two_revisions_of_an_adapter_are_rejected_if_pods_download_them() -> None:
    adapters = [SQL | {"revision": "v1"}, SQL | {"name": "newer", "revision": "v2"}]
    assert "one folder" in problems(pair_70b(adapters=adapters))["spec.adapters[1].revision"]
    valid_facts(SpecDecodeDeploymentSpec.parse(pair_70b(adapters=adapters, models=CACHE)))


def test_emulated_engine_rejects_adapters() -> None:
    replay = {"mode": "Emulated", "trace": {"configMap": {"name": "x"}, "path": "model.json"}}
    spec = pair_70b(adapters=[SQL], engine={"replay": replay, "image": "localhost/engine:1"})
    assert "runs no adapters" in problems(spec)["spec.adapters"]


def notes(spec: Body) -> str:
    return "\n".join(plan_notes(valid_facts(SpecDecodeDeploymentSpec.parse(spec))))


def test_notes_name_what_adapters_change() -> None:
    assert "draft is not adapted" in notes(pair_70b(adapters=[SQL]))
    assert "draft is not adapted" not in notes({"target": pair_70b()["target"], "adapters": [SQL]})
    assert "host memory" in notes(pair_70b(adapters=[SQL], adapterSlots={"host": 512, "maxRank": 64}))
    assert "host memory" not in notes(pair_70b(adapters=[SQL]))
    assert "adapters" not in notes(pair_70b())


def test_loading_adapters_by_the_api_has_a_note() -> None:
    variable = {"name": "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "value": "1"}
    assert "/v1/load_lora_adapter" in notes(pair_70b(engine={"env": [variable]}))
    assert "/v1/load_lora_adapter" not in notes(pair_70b(engine={"env": [variable | {"value": "0"}]}))
