"""Deployments whose engines cannot get a head without a restart."""

import json
from dataclasses import replace
from typing import Any

import pytest

from specdecode_operator.deployment.desired_state import Launch
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.training.in_place import order, update_of, why_restart
from specdecode_operator.training.offers import OfferedHead
from specdecode_operator.vllm.engine_metrics import EngineReading, HeadUpdate, Unreachable
from specdecode_operator.vllm.profiles import find_profile
from tests.support.better_trainings import HEAD_CONFIG, asking
from tests.support.decisions import desired_state
from tests.support.objects import Body, parent


def head(name: str, *, claim: str = "heads", path: str = "", config: Body | None = None, **changes: Any) -> OfferedHead:
    draft = {"model": f"team/{name}/head", "config": config or HEAD_CONFIG}
    speculation = {"method": "eagle3", "numSpeculativeTokens": 3, "draft": draft, **changes}
    return OfferedHead(name, claim, path or f"team/{name}/head", name[0] * 64, speculation)


OLD, NEW = head("a"), head("b")


def launch(**spec: Any) -> Launch:
    found = desired_state(parse_deployment(parent(asking(**spec)))).outcome
    assert isinstance(found, Launch)
    return found


def test_head_of_the_same_shape_needs_no_restart() -> None:
    made = {**HEAD_CONFIG, "transformers_version": "6", "speculators_config": {"algorithm": "eagle3"}}
    for new in (NEW, head("b", config=made)):
        assert why_restart(launch(), OLD, new) == ""


@pytest.mark.parametrize(
    ("start", "new", "why"),
    [
        (None, NEW, "draft of the spec"),
        (OLD, head("b", claim="other"), "claim other"),
        (OLD, head("b", path="team/a/head"), "team/a/head"),
        (OLD, head("b", numSpeculativeTokens=4), "numSpeculativeTokens"),
        (OLD, head("b", config={**HEAD_CONFIG, "draft_vocab_size": 256}), "config"),
        (OLD, head("b", method="dflash"), "method"),
        (OLD, head("b", config={**HEAD_CONFIG, "speculators_model_type": "peagle"}), "EAGLE-3"),
    ],
)
def test_head_of_another_shape_needs_a_restart(start: OfferedHead | None, new: OfferedHead, why: str) -> None:
    assert why in why_restart(launch(), start, new)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({"rollout": {"gate": {"capture": "golden"}}}, "spec.rollout.gate"),
        ({"rollout": {"strategy": "Canary"}}, "Canary"),
        ({"rollout": {"paused": True}}, "spec.rollout.paused"),
    ],
)
def test_some_settings_need_a_restart(spec: Body, why: str) -> None:
    assert why in why_restart(launch(**spec), OLD, NEW)


def test_old_engine_needs_a_restart() -> None:
    found = launch()
    old = replace(found, facts=replace(found.facts, profile=find_profile("0.31")))
    assert "vLLM 0.31 is older than 0.32" in why_restart(old, OLD, NEW)


def reading(sha256: str = "", result: str = "kept") -> EngineReading:
    told = HeadUpdate(sha256, result, "why", 0.5) if sha256 else None
    return EngineReading(*(None,) * 5, 0, 0, 0, head_update=told)


def test_engine_that_cannot_be_scraped_waits() -> None:
    found = update_of(NEW, OLD, 3, {"1": reading(NEW.sha256), "2": Unreachable("timeout"), "3": reading()})
    assert (found.updated, found.waiting, found.is_complete) == (("1",), ("2", "3"), False)
    assert json.loads(order(found, launch().facts, everywhere=False))["heads"][0]["pods"] == ["1", "2"]


def test_engine_that_started_with_the_head_has_it() -> None:
    found = update_of(OLD, OLD, 2, {"1": reading(), "2": reading(NEW.sha256)})
    assert (found.updated, found.waiting) == (("1",), ("2",))


def test_failed_engine_is_not_complete() -> None:
    found = update_of(NEW, OLD, 1, {"1": reading(NEW.sha256, "failed")})
    assert (found.is_complete, found.is_wrong) == (False, False)
    assert found.failure == "pod 1: failed: why"


def test_update_without_wanted_engines_is_not_complete() -> None:
    assert not update_of(NEW, OLD, 0, {}).is_complete
