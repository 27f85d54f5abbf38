"""Rope scaling and --hf-overrides: passed to the engine and counted by sizing."""

import json
from typing import Any

import pytest

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.deployment.engine_settings import engine_settings
from specdecode_operator.deployment.spec_facts import Facts
from specdecode_operator.deployment.validation import valid_facts
from specdecode_operator.deployment.warnings import plan_warnings
from specdecode_operator.problems import InvalidSpecError
from specdecode_operator.vllm.arguments import HF_OVERRIDES, command_line
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS

QWEN = "Qwen/Qwen3-32B"
YARN = {"type": "yarn", "factor": "4.0", "originalMaxPositionEmbeddings": 32_768}
ROPE = {"rope_theta": 1_000_000, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}


def facts(target: dict[str, Any], *extra_args: str, version: str = "0.32", **serving: Any) -> Facts:
    """Facts of a target alone."""
    spec = {"target": target, "serving": serving, "engine": {"version": version, "extraArgs": list(extra_args)}}
    return valid_facts(SpecDecodeDeploymentSpec.parse(spec))


def line(found: Facts) -> list[str]:
    """The command line of an engine on one GPU."""
    return command_line(engine_settings(found.spec, found.pair, 1), found.profile)


def told(found: Facts) -> dict[str, Any]:
    """What the engine is told of the config.json."""
    words = line(found)
    keys: dict[str, Any] = json.loads(words[words.index(HF_OVERRIDES) + 1])
    return keys


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
def test_yarn_rope_scaling_becomes_hf_overrides_in_every_version(version: str) -> None:
    found = facts({"model": QWEN, "ropeScaling": YARN}, version=version)
    assert found.pair.limits.max_model_len == 131_072
    assert told(found) == {"rope_parameters": ROPE, "max_position_embeddings": 131_072}


@pytest.mark.parametrize("kind", ["linear", "dynamic"])
def test_linear_and_dynamic_scaling_multiply_the_model_length(kind: str) -> None:
    found = facts({"model": QWEN, "ropeScaling": {"type": kind, "factor": "2"}})
    assert found.pair.limits.max_model_len == 81_920
    assert told(found) == {"rope_parameters": {"rope_theta": 1_000_000, "rope_type": kind, "factor": 2.0}}


def test_rope_scaling_goes_into_the_text_config_of_multimodal_models() -> None:
    model = "Qwen/Qwen3-VL-32B-Instruct"
    found = facts({"model": model, "ropeScaling": {"type": "yarn", "factor": "2"}})
    (inner,) = told(found).values()
    assert inner["rope_parameters"]["mrope_section"] == [24, 20, 20]
    assert inner["max_position_embeddings"] == found.pair.limits.max_model_len == 524_288


@pytest.mark.parametrize(
    "extra_args",
    [
        [HF_OVERRIDES, json.dumps({"rope_parameters": ROPE, "max_position_embeddings": 131_072})],
        [f"{HF_OVERRIDES}={json.dumps({'rope_scaling': ROPE, 'max_position_embeddings': 131_072})}"],
        [f"{HF_OVERRIDES}.rope_parameters", json.dumps(ROPE), f"{HF_OVERRIDES}.max_position_embeddings=131072"],
    ],
)
def test_hf_overrides_in_extra_args_are_counted_and_passed_once(extra_args: list[str]) -> None:
    found = facts({"model": QWEN}, *extra_args, maxModelLen=131_072)
    assert found.pair.target.ropes[0].positions == 131_072
    assert [word for word in line(found) if word.startswith(HF_OVERRIDES)] == [
        word for word in extra_args if word.startswith(HF_OVERRIDES)
    ]


def test_yarn_factor_alone_extends_the_length_up_to_0_29() -> None:
    extra_args = (HF_OVERRIDES, json.dumps({"rope_parameters": ROPE}))
    assert facts({"model": QWEN}, *extra_args, version="0.29", maxModelLen=131_072)
    with pytest.raises(InvalidSpecError, match="at most 40960 tokens"):
        facts({"model": QWEN}, *extra_args, version="0.30", maxModelLen=131_072)


def test_hf_overrides_of_model_dimensions_are_counted() -> None:
    fewer = facts({"model": QWEN}, HF_OVERRIDES, '{"num_hidden_layers": 4}')
    assert fewer.pair.target.num_layers == 4
    with pytest.raises(InvalidSpecError, match=r"extraArgs\[0\].*num_hidden_layers"):
        facts({"model": QWEN}, HF_OVERRIDES, '{"num_hidden_layers": "four"}')


DRAFTED = {"method": "draft_model", "numSpeculativeTokens": 3, "draft": {"model": "Qwen/Qwen3-1.7B"}}


@pytest.mark.parametrize(
    ("version", "model", "speculation", "words"),
    [
        ("0.30", QWEN, DRAFTED, "drafts for no request"),
        ("0.32", QWEN, DRAFTED, "drafts beyond that with positions unknown to the draft"),
        (
            "0.32",
            "Qwen/Qwen3-Next-80B-A3B-Instruct",
            {"method": "mtp", "numSpeculativeTokens": 2},
            "do not get its extended rope",
        ),
    ],
)
def test_draft_shorter_than_the_extended_target_is_a_warning(
    version: str, model: str, speculation: Any, words: str
) -> None:
    spec = {"target": {"model": model, "ropeScaling": YARN}, "speculation": speculation, "engine": {"version": version}}
    found = valid_facts(SpecDecodeDeploymentSpec.parse(spec))
    assert any(words in warning for warning in plan_warnings(found, {}, 1))
    del spec["target"]["ropeScaling"]  # type: ignore[attr-defined]
    found = valid_facts(SpecDecodeDeploymentSpec.parse(spec))
    assert not any(words in warning for warning in plan_warnings(found, {}, 1))


LONG = {"name": "VLLM_ALLOW_LONG_MAX_MODEL_LEN", "value": "1"}


def longer(value: str, length: int, *extra_args: str) -> Facts:
    """Facts of a length beyond the model's, and what the variable says."""
    engine = {"version": "0.33", "extraArgs": list(extra_args), "env": [LONG | {"value": value}]}
    spec = {"target": {"model": QWEN}, "serving": {"maxModelLen": length}, "engine": engine}
    return valid_facts(SpecDecodeDeploymentSpec.parse(spec))


def test_long_max_model_len_variable_allows_longer_with_warning() -> None:
    found = longer(" True", 131_072)
    assert found.pair.limits.max_model_len == 131_072
    (warning,) = plan_warnings(found, {}, 1)
    assert "outputs beyond 40960 tokens are wrong" in warning
    (stretched,) = plan_warnings(longer("1", 131_072, HF_OVERRIDES, json.dumps({"rope_parameters": ROPE})), {}, 1)
    assert "its YaRN extends to 131072" in stretched
    assert plan_warnings(longer("1", 4096), {}, 1) == []
