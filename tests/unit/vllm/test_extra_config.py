"""Keys of ``--speculative-config`` without a field: passed on as they are, or refused with what to write instead."""

import json
from typing import Any

import pytest

from specdecode_operator.enums import Method
from specdecode_operator.vllm.profiles import KNOWN_VERSIONS, find_profile
from specdecode_operator.vllm.speculative_config import (
    SPECULATIVE_KEYS,
    extra_config_problems,
    reserved_key_problem,
    speculative_config,
    unknown_keys,
)
from tests.support.engine_settings import replace, speculating_with
from tests.unit.vllm.engine_cases import PLAIN

NEWEST = find_profile(KNOWN_VERSIONS[-1])
PASSED = {
    "attention_backend": "TRITON_ATTN",
    "moe_backend": "triton",
    "kv_cache_dtype": "auto",
    "enforce_eager": True,
    "draft_load_config": {"load_format": "safetensors"},
    "disable_padded_drafter_batch": True,
    "index_share_for_mtp_iteration": True,
    "dspark_draft_topk": 4,
}


def problems(config: dict[str, Any], version: str = KNOWN_VERSIONS[-1], **more: bool) -> dict[str, str]:
    """Return the messages by the last part of their field."""
    found = extra_config_problems(config, find_profile(version), **more)
    return {each.field.removeprefix("spec.speculation.extraConfig."): each.message for each in found}


def test_what_has_no_field_is_passed_on() -> None:
    assert problems(PASSED) == {}
    speculation = speculating_with(Method.MTP, 2, extra_config=json.dumps(PASSED))
    config = json.loads(speculative_config(replace(PLAIN, speculation=speculation), NEWEST) or "")
    assert config.items() >= PASSED.items()


@pytest.mark.parametrize("key", SPECULATIVE_KEYS, ids=lambda key: key.key)
def test_a_key_that_a_field_decides_names_the_field(key: Any) -> None:
    (message,) = problems({key.key: 1}).values()
    assert key.key == "parallel_drafting" or key.field in message


def test_every_key_of_every_version_is_judged() -> None:
    """A key that a new vLLM brings is passed on, unless a field or a refusal names it."""
    for version in KNOWN_VERSIONS:
        for key in find_profile(version).speculative_keys:
            assert (key in problems({key: None}, version, checks_by_entropy=True)) == (
                reserved_key_problem(key) is not None
            )


def test_a_key_of_another_version_is_refused_with_what_to_do() -> None:
    assert "came with 0.30" in problems({"disable_eagle_block_drop": True}, "0.28")["disable_eagle_block_drop"]
    assert "attention_backend?" in problems({"atention_backend": "x"})["atention_backend"]
    assert problems({"magic": 1}, "0.99") == {}
    assert unknown_keys({"magic": 1, "moe_backend": "triton"}, find_profile("0.99")) == ["magic"]
    assert unknown_keys({"magic": 1}, NEWEST) == []


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("enforce_eager", "perhaps", "true or false"),
        ("enforce_eager", 2, "true or false"),
        ("attention_backend", 3, "a text"),
        ("dspark_draft_topk", True, "a whole number"),
        ("draft_load_config", "dummy", "an object"),
    ],
)
def test_a_value_of_another_type_is_refused(key: str, value: object, wanted: str) -> None:
    assert wanted in problems({key: value})[key]


@pytest.mark.parametrize(("key", "value"), [("enforce_eager", "yes"), ("enforce_eager", 0), ("dspark_draft_topk", "3")])
def test_a_value_that_vllm_reads_from_text_is_passed_on(key: str, value: object) -> None:
    assert problems({key: value}) == {}


def test_keys_of_fly_are_for_fly() -> None:
    assert "rejectionSampling: fly" in problems({"fly_window_size": 2})["fly_window_size"]
    assert problems({"fly_window_size": 2}, checks_by_entropy=True) == {}


def test_made_up_acceptance_is_refused() -> None:
    assert problems({"synthetic_acceptance_length": 2.5}).keys() == {"synthetic_acceptance_length"}
