"""Lookups beside a gated delta net, whose states vLLM does not restore after rejected drafts."""

from typing import Any

import pytest

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.deployment.models.model_locations import NO_MODELS
from specdecode_operator.deployment.validation import valid_facts
from specdecode_operator.deployment.warnings import plan_warnings

DELTA_NET = "Qwen/Qwen3.5-27B"
NGRAM = {"method": "ngram", "ngram": {"promptLookupMin": 2, "promptLookupMax": 5}}
SUFFIX = {"method": "suffix"}


def warned(target: str, speculation: dict[str, Any]) -> list[str]:
    body = {
        "target": {"model": target},
        "speculation": {"numSpeculativeTokens": 5, **speculation},
        "serving": {"maxModelLen": 32768},
        "engine": {"image": "registry.example/vllm:v0.33.0"},
    }
    facts = valid_facts(SpecDecodeDeploymentSpec.model_validate(body))
    return [warning for warning in plan_warnings(facts, NO_MODELS, 1) if "vllm#39273" in warning]


@pytest.mark.parametrize("speculation", [NGRAM, SUFFIX], ids=["ngram", "suffix"])
def test_lookups_beside_a_delta_net_are_warned_of(speculation: dict[str, Any]) -> None:
    [warning] = warned(DELTA_NET, speculation)
    assert "mtp" in warning


def test_its_own_layers_are_not() -> None:
    assert warned(DELTA_NET, {"method": "mtp", "numSpeculativeTokens": 2}) == []


def test_attention_has_no_states() -> None:
    assert warned("Qwen/Qwen3-8B", NGRAM) == []
