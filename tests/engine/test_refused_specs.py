"""A rule that the API server runs repeats one of the engine's, which `test_refusals.py` asks about, or is our own."""

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from specdecode_operator.api.base import ApiModel
from specdecode_operator.api.crd_validation import as_stored, evaluator
from specdecode_operator.api.deployment import Engine, EnvVar, SpecDecodeDeploymentSpec
from specdecode_operator.api.deployment_rules import RULES, SOURCES, Rule
from specdecode_operator.api.speculation import HostPath, Models, ModelVolume
from specdecode_operator.vllm.arguments import command_line
from tests.component.admission.rejection_cases import BAD
from tests.component.admission.replay_rejection_cases import REPLAYS
from tests.engine.contract_cases import MODELS
from tests.engine.contract_checks import Vllm
from tests.engine.differences import assert_none
from tests.engine.engine_versions import NEWEST
from tests.engine.refused_specs import settings_despite
from tests.support.objects import Body

DRAFTS = {"eagle": "head", "eagle3": "head3", "medusa": "several-heads", "dflash": "block", "dspark": "linked-block"}
"""What drafts in `contract_cases.py`, by method; a model of its own for the others."""

PLACES = (Models, ModelVolume, HostPath, Engine, EnvVar)
"""Models of the spec that say where things come from. The engine sees paths and values, not their sources."""

OURS = {
    "K without a method": "there is no method that would read it",
    "K above 32": "sizing knows no engine that drafts more, but for suffix decoding",
    "head with checkpoints": "what vLLM makes of a head while loading is not known to sizing",
    "draft's checkpoints beside its claim": "the operator's own: a claim holds one checkpoint",
    "schedule without a method": "there is no method that would read it",
    "checking of nothing": "there is no method that would read it",
    "further keys of nothing": "there is no method that would read them",
    "nothing assumed": "sizing's own: the engine is not told",
    "range beyond maxNumSeqs": "such a range never counts: it is a slip of the pen",
    "XPress without a head": "the engine looks at it beside a draft alone",
    "CPU without cores": "the pod's limit, which the engine does not see",
    "CPU without memory": "the pod's limit, which the engine does not see",
    "CPU without KV cache": "0 GiB is vLLM's word for a default of its own, which sizing does not count on",
    "cores on GPU": "no meaning there",
    "memory on GPU": "no meaning there",
    "KV cache on GPU": "no meaning there: the share of the GPU decides",
    "product on CPU": "no meaning there",
    "memory a GPU on CPU": "no meaning there",
    "memory of no product": "it says how much one product has",
    "GPUs a node on CPU": "no meaning there",
    "KV cache takes all memory": "the pod is killed for memory once weights are loaded",
    "product twice": "a slip of the pen",
    "claim on CPU": "the engine is not told how its pod gets GPUs",
    "devices without tensor": "the same",
    "devices that do not divide the replica": "the same",
    "more at once than may run": "sizing's own: the engine is not told",
    "served name twice": "a slip of the pen",
    "two element types": "the engine is told one of them",
    "a length that nothing multiplies": "vLLM passes over it",
    "a cool-down shorter than the window": "the operator's own: the engine knows no policy",
    "a minimum above the maximum": "the operator's own: the engine knows no autoscaler",
    "zero replicas that nothing wakes up": "the same",
    "zero replicas with KEDA that nothing wakes up": "the same",
    "a percentage above 100": "the same",
    "more requests than an engine runs": "the same",
    "an update in place of no trained heads": "the operator's own: the engine knows no trainings",
    "two schedules that train on one claim": "the same",
    "adapter that is no hub id": "the operator's own: the engine is given a path",
    "adapter outside of its volume": "the same",
    "adapter's revision in a volume": "the same",
    "image of models without a tag": "the same",
    "image of models with a scheme": "the same",
    "draft on a claim and an image": "the same",
    "model at the root of an image without a name": "the same",
    "slots without adapters": "there is no adapter that would take them",
    "slots of too low a rank": "the engine finds it when it loads the adapter",
}
"""What breaks a rule that no rule of the engine repeats, and why there is one."""

AT_START = {"rank that vLLM does not know", "fewer adapters on the host"}
"""What the engine refuses when it starts, without a rule of ours on its flags."""


def body_of(text: str) -> Body:
    """Return a spec of the rejection cases, with models whose config.json is known."""
    body: Body = {"target": {"model": "org/target"}, "serving": {}, **yaml.safe_load(text)}
    body["target"] = {"config": MODELS["target"]} | body["target"]
    body["serving"] = {"maxModelLen": 8192} | body["serving"]
    speculation = body.get("speculation", {})
    if "draft" in speculation:
        draft = MODELS[DRAFTS.get(speculation["method"], "draft")]
        body["speculation"] = speculation | {"draft": {"config": draft} | speculation["draft"]}
    if body.get("accelerator", {}).get("type") == "CPU":
        body["engine"] = {"image": "registry.example/vllm-cpu:v0.32.0"}
    return body


def parts(model: Any) -> Iterator[ApiModel]:
    """Yield an object and all that are in it."""
    if isinstance(model, ApiModel):
        yield model
        for name in type(model).model_fields:
            value = getattr(model, name)
            for each in value if isinstance(value, list) else [value]:
                yield from parts(each)


def broken(spec: SpecDecodeDeploymentSpec) -> list[Rule]:
    """Return the rules that a spec breaks."""
    return [
        rule for part in parts(spec) for rule in RULES.get(type(part), ()) if not evaluator(as_stored(part))(rule.holds)
    ]


def of_the_engine() -> list[Rule]:
    """Return the rules on what the engine is told."""
    return [rule for owner, rules in RULES.items() if owner not in PLACES for rule in rules if rule not in SOURCES]


def test_every_crd_rule_repeats_a_vllm_rule_or_is_listed_as_ours(vllm: Vllm, tmp_path: Any) -> None:
    if vllm.profile.version != NEWEST:
        pytest.skip("the rules are those of the newest version")
    rules, departures, seen = of_the_engine(), {}, []
    for name, bad in BAD.items():
        try:
            spec = SpecDecodeDeploymentSpec.model_validate(body_of(bad.spec))
        except ValueError:
            continue  # a field is bad by itself
        found = [rule for rule in broken(spec) if rule in rules]
        if not found:
            continue
        seen += found
        if name in REPLAYS:
            continue  # no rule of the engine's: it is told nothing of a replay
        settings, told = settings_despite(body_of(bad.spec), tmp_path / str(len(seen)))
        if name in AT_START:
            line = command_line(settings, vllm.profile)[2:]
            departures[name] = "" if vllm.oracle(settings).ask("start", line).error else "the engine takes it"
        elif name not in OURS:
            repeated = any(problem.field.startswith(bad.field) for problem in told)
            departures[name] = "" if repeated else f"no rule of the engine says so: {told}"
        elif told:
            departures[name] = f"a rule of the engine says so: {told}"
        else:
            line = command_line(settings, vllm.profile)[2:]
            departures[name] = vllm.oracle(settings).ask("start", line).error or ""
    assert_none(f"{name}: {what}" for name, what in departures.items() if what)
    assert [rule for rule in rules if rule not in seen] == [], "no case breaks it"
    assert set(OURS) <= set(departures)
