"""Drafts that propose all tokens in one pass, PARD and P-EAGLE: recognized by their files, and sized as they run."""

from dataclasses import replace
from typing import Any

import pytest

from specdecode_operator.enums import Precision
from specdecode_operator.sizing.catalogue import find_entry, find_geometry
from specdecode_operator.sizing.errors import GeometryError
from specdecode_operator.sizing.families.architectures import head_from_config
from specdecode_operator.sizing.pair import EngineLimits, Pair, effective_batch, extra_slots
from specdecode_operator.sizing.rank_layers import Split
from specdecode_operator.sizing.version_rules import Runner
from specdecode_operator.sizing.weights import weight_bytes

Config = dict[str, Any]
QWEN, LLAMA = "Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B"


def config_of(model: str) -> Config:
    entry = find_entry(model)
    assert entry is not None
    return dict(entry.config)


TRAINED = config_of("sgl-project/SpecForge:configs/qwen3-8b-peagle.json")
PEAGLE = TRAINED | {"architectures": ["LlamaForCausalLMEagle3"], "ptd_token_id": 151_669}
PARD = config_of("meta-llama/Llama-3.2-1B") | {"pard_token": 128_255}
SPECULATOR = {
    "architectures": ["PEagleDraftModel"],
    "speculators_model_type": "peagle",
    "draft_vocab_size": 32_000,
    "mask_token_id": 151_669,
    "transformer_layer_config": {key: value for key, value in TRAINED.items() if key != "draft_vocab_size"},
}


def drafting(limits: EngineLimits, target_id: str, method: str, config: Config) -> Pair:
    target = find_geometry(target_id)
    assert target is not None
    limited = replace(limits, max_num_seqs=1024, kv_cache_element_bytes=2)
    return Pair(target, Precision.BF16, head_from_config("draft", config, method), Precision.BF16, method, 7, limited)


def draft_bytes(pair: Pair) -> int:
    assert pair.draft is not None
    return weight_bytes(pair.draft, Precision.BF16, Split(1))


@pytest.mark.parametrize(
    ("target", "method", "config", "places"),
    [(QWEN, "eagle3", PEAGLE, (6, 585)), (LLAMA, "draft_model", PARD, (7, 546))],
)
def test_it_takes_places_for_its_tokens_and_runs_on_v1(
    limits: EngineLimits, target: str, method: str, config: Config, places: tuple[int, int]
) -> None:
    pair = drafting(limits, target, method, config)
    assert (extra_slots(pair), effective_batch(pair)) == places
    one_by_one = {key: value for key, value in config.items() if key not in ("ptd_token_id", "pard_token")}
    plain = drafting(limits, target, method, one_by_one)
    assert (pair.era.runner, plain.era.runner) == (Runner.V1, Runner.V2)
    assert extra_slots(plain) == (1 if method == "draft_model" else 0)
    # Of EAGLE-3 the state of a place to fill: as many numbers as it reads of the target.
    assert draft_bytes(pair) - draft_bytes(plain) == (0 if method == "draft_model" else 3 * 4096 * 2)


def test_a_state_of_a_place_is_as_wide_as_the_target() -> None:
    narrow = PEAGLE | {"hidden_size": 2048, "head_dim": 128, "target_hidden_size": 4096}
    plain = {key: value for key, value in narrow.items() if key != "ptd_token_id"}
    in_one_pass, one_by_one = (head_from_config("draft", config, "eagle3") for config in (narrow, plain))
    sizes = [weight_bytes(head, Precision.BF16, Split(1)) for head in (in_one_pass, one_by_one)]
    assert sizes[0] - sizes[1] == 3 * 4096 * 2


def test_a_model_with_a_mask_token_alone_was_not_trained_to_draft_in_one_pass() -> None:
    """vLLM would fill places with it if it were told to; ordinary models may have one."""
    masked = config_of("meta-llama/Llama-3.2-1B") | {"mask_token_id": 128_255}
    assert not head_from_config("draft", masked, "draft_model").drafts_in_parallel


def test_a_file_of_the_speculators_library_has_the_layers_that_its_section_says(limits: EngineLimits) -> None:
    pair = drafting(limits, QWEN, "eagle3", SPECULATOR)
    assert pair.drafts_in_parallel
    assert draft_bytes(pair) == draft_bytes(drafting(limits, QWEN, "eagle3", PEAGLE))


@pytest.mark.parametrize(
    ("config", "words"),
    [(TRAINED, "convert it"), ({**SPECULATOR, "mask_token_id": None}, "fills the places")],
)
def test_a_file_that_the_engine_does_not_start_with_is_refused(config: Config, words: str) -> None:
    with pytest.raises(GeometryError, match=words):
        head_from_config("head", config, "eagle3")
