"""The file of canaries that the sidecar reads, and the cost of canaries."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from specdecode_operator.api.deployment import MOST_CANARIES, Canaries, SpecDecodeDeploymentSpec
from specdecode_operator.capture.recorder import canary
from specdecode_operator.capture.recorder.canary import read_settings
from specdecode_operator.deployment.canaries import (
    CLOSE_NATS,
    COARSE_NATS,
    DEFAULT_PROMPTS,
    canaries_json,
    hourly_cost,
    not_asked,
)
from specdecode_operator.deployment.spec_facts import Facts, gather_facts
from tests.support.objects import Body, pair_70b
from tests.support.replay_field_cases import replaying

ASKED: Body = {"canaries": {}}


def facts(policy: Body | None = ASKED, **changes: Any) -> Facts:
    return gather_facts(SpecDecodeDeploymentSpec.parse(pair_70b(policy=policy, **changes)))


def written(found: Facts) -> Any:
    text = canaries_json(found)
    assert text is not None
    return json.loads(text)


def test_sidecar_reads_the_canary_settings_of_the_operator() -> None:
    prompts = ["Grüße \U0001f600 " * 200, "x" * 2000, "again", "again"]
    asked = {"canaries": {"intervalSeconds": 60, "maxTokens": 256, "prompts": prompts}}
    text = canaries_json(facts(asked, serving={"servedModelNames": ["chat", "other"]}))
    assert text is not None
    settings = read_settings(text.encode())
    assert settings.prompts == tuple(prompts[:3])
    assert (settings.max_tokens, settings.interval_s, settings.model) == (256, 60, "chat")
    defaults = canaries_json(facts())
    assert defaults is not None
    assert read_settings(defaults.encode()).prompts == DEFAULT_PROMPTS


def test_canary_limits_of_the_api_and_the_sidecar_are_equal() -> None:
    assert MOST_CANARIES == canary.MOST_PROMPTS
    longest = [f"{number:02}" + "\U0001f600" * (canary.MOST_PROMPT_CHARACTERS - 2) for number in range(MOST_CANARIES)]
    text = canaries_json(facts({"canaries": {"maxTokens": canary.MOST_TOKENS, "prompts": longest}}))
    assert text is not None
    assert len(read_settings(text.encode()).prompts) == MOST_CANARIES
    for field, value in {
        "prompts": ["x"] * (MOST_CANARIES + 1),
        "maxTokens": canary.MOST_TOKENS + 1,
        "intervalSeconds": 59,
    }.items():
        with pytest.raises(ValidationError):
            Canaries.parse({field: value})
    with pytest.raises(ValidationError):
        Canaries.parse({"prompts": ["x" * (canary.MOST_PROMPT_CHARACTERS + 1)]})


@pytest.mark.parametrize(
    ("changes", "margin_nats"),
    [
        pytest.param({}, CLOSE_NATS, id="16 bits"),
        pytest.param({"target": {"model": "meta-llama/Llama-3.1-70B-Instruct", "quantization": "FP8"}}, COARSE_NATS),
        pytest.param({"serving": {"kvCacheDtype": "fp8"}}, COARSE_NATS, id="KV cache"),
        pytest.param({"target": {"model": "Qwen/Qwen3-30B-A3B"}, "speculation": None}, COARSE_NATS, id="experts"),
    ],
)
def test_canary_margin_is_wider_for_quantization_and_experts(changes: Body, margin_nats: float) -> None:
    assert written(facts(**changes))["margin_nats"] == margin_nats


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(facts(None), id="no policy"),
        pytest.param(facts({"mode": "Enforce"}), id="no canaries"),
        pytest.param(facts(engine=replaying()["engine"]), id="replay"),
        pytest.param(
            facts(
                speculation={**pair_70b()["speculation"], "rejectionSampling": "fly", "lossy": True},
                engine={"version": "0.33"},
            ),
            id="lossy",
        ),
    ],
)
def test_no_canaries_without_policy_or_for_replays_and_lossy_engines(found: Facts) -> None:
    assert canaries_json(found) is None


def test_reason_for_no_canaries_names_the_field() -> None:
    lossy = {**pair_70b()["speculation"], "rejectionSampling": "fly", "lossy": True}
    assert "spec.speculation.lossy" in (not_asked(facts(speculation=lossy)) or "")
    assert not_asked(facts()) is None


def test_hourly_cost_is_an_upper_bound_on_prompt_tokens() -> None:
    cost = hourly_cost(Canaries.parse({"intervalSeconds": 1800, "maxTokens": 10, "prompts": ["ab", "é"]}))
    assert cost.generated_tokens == 2 * 2 * (10 + 1)
    assert cost.prompt_tokens == 2 * 2 * (2 * (2 + 1) + 10)
