"""DFlash heads with an XPress refiner: recognized by their files, and sized with what refining takes."""

from dataclasses import replace
from typing import Any

import pytest

from specdecode_operator.enums import Method, Precision
from specdecode_operator.sizing.arithmetic import GIB
from specdecode_operator.sizing.catalogue import find_entry, find_geometry
from specdecode_operator.sizing.errors import GeometryError, PlanError
from specdecode_operator.sizing.families.architectures import head_from_config
from specdecode_operator.sizing.families.draft_heads import method_of_head
from specdecode_operator.sizing.memory.activation import activation_bytes, refining_bytes, refining_scratch_bytes
from specdecode_operator.sizing.pair import EngineLimits, Pair, Parallelism, loaded_draft
from specdecode_operator.sizing.weights import copied_bytes, parameter_count

Config = dict[str, Any]
VOCABULARY, WIDTH = 151_936, 4096


def config_of(model: str) -> Config:
    entry = find_entry(model)
    assert entry is not None
    return dict(entry.config)


PLAIN = config_of("sgl-project/SpecForge:configs/qwen3-8b-dflash.json")
XPRESS = PLAIN | {"architectures": ["Qwen3XPressModel"], "xpress_rank": 128, "xpress_mlp_hidden": 64}
XPRESS |= {"xpress_block_size": 8}


def drafting(limits: EngineLimits, config: Config = XPRESS, k: int = 7, **limited: Any) -> Pair:
    target = find_geometry("Qwen/Qwen3-8B")
    assert target is not None
    head = head_from_config("draft", config, "dflash")
    settings = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "kv_cache_element_bytes": 2} | limited
    return Pair(target, Precision.BF16, head, Precision.BF16, "dflash", k, replace(limits, **settings))


@pytest.mark.parametrize("architecture", ["Qwen3XPressModel", "DFlashQwen3XPressModel"])
def test_it_is_a_dflash_head_with_two_more_tables_and_copies(limits: EngineLimits, architecture: str) -> None:
    refined = drafting(limits, XPRESS | {"architectures": [architecture]}).draft
    plain = drafting(limits, PLAIN).draft
    assert refined is not None
    assert plain is not None
    assert method_of_head(refined) is Method.DFLASH
    inner = 128 * (3 * 128 + 8 * 8 + 3 * 64)
    tables, projections = 2 * VOCABULARY * 128, 2 * WIDTH * 128
    assert parameter_count(refined) - parameter_count(plain) == tables + projections + inner
    assert copied_bytes(refined, 1) - copied_bytes(plain, 1) == 2 * (VOCABULARY * 128 + inner)


def test_a_quantized_head_has_a_refiner_in_16_bits() -> None:
    quantized = XPRESS | {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}
    head = head_from_config("draft", quantized, "dflash")
    assert copied_bytes(head, 1) == 2 * 128 * (VOCABULARY + 3 * 128 + 8 * 8 + 3 * 64)


def test_what_its_file_leaves_out_is_as_the_engine_has_it() -> None:
    short = {key: value for key, value in XPRESS.items() if not key.startswith("xpress")}
    full = short | {"xpress_rank": 256, "xpress_mlp_hidden": 512, "xpress_block_size": 16, "xpress_topc": 512}
    heads = [head_from_config("draft", config, "dflash").head for config in (short, full)]
    assert heads[0] == heads[1]
    steps = head_from_config("draft", short | {"num_speculative_steps": 7}, "dflash").head
    assert steps is not None
    assert steps.most_tokens == 7


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sample_from_anchor", True),
        ("draft_vocab_size", 32_000),
        ("xpress_topc", VOCABULARY + 1),
        ("xpress_topc", -1),
        ("xpress_topc", "all"),
        ("xpress_rank", 0),
    ],
)
def test_files_that_the_engine_does_not_take_are_refused(key: str, value: object) -> None:
    with pytest.raises(GeometryError) as caught:
        head_from_config("draft", XPRESS | {key: value}, "dflash")
    assert caught.value.field == key


@pytest.mark.parametrize("k", [6, 8])
def test_it_proposes_blocks_of_its_own_size_alone(limits: EngineLimits, k: int) -> None:
    with pytest.raises(PlanError, match="write 7") as caught:
        loaded_draft(drafting(limits, k=k))
    assert caught.value.field == "speculation.numSpeculativeTokens"


def test_versions_before_0_33_do_not_know_it(limits: EngineLimits) -> None:
    assert loaded_draft(drafting(limits)) is not None
    with pytest.raises(PlanError, match=r"use 0\.33 or later") as caught:
        loaded_draft(drafting(limits, engine_version="0.32.0"))
    assert caught.value.field == "speculation.draft.model"


def refining(pair: Pair, tensor: int = 1) -> tuple[int, int]:
    """What refining takes for a moment, and what it keeps."""
    assert pair.draft is not None
    return refining_bytes(pair, pair.draft, tensor), refining_scratch_bytes(pair, pair.draft)


def test_refining_takes_logits_twice_or_the_rows_of_its_candidates(limits: EngineLimits) -> None:
    requests = 256
    states, logits = requests * 8 * WIDTH * 2, requests * 8 * VOCABULARY * 2
    copy = requests * 7 * VOCABULARY * 2
    assert refining(drafting(limits)) == (states + logits + copy, 0)
    rows = requests * 7 * 2048 * (130 * 2 + 8)
    many = replace(drafting(limits), refined_candidates=2048)
    assert refining(many) == (states + logits + rows, 0)
    assert refining(drafting(limits, XPRESS | {"xpress_topc": 2048})) == refining(many)
    assert refining(drafting(limits), 4)[0] == states + logits + logits + logits // 4
    # No more requests than a step has room for.
    assert refining(drafting(limits, max_num_batched_tokens=512))[0] == (states + logits + copy) // 4


def test_without_candidates_it_keeps_logits_for_all_requests(limits: EngineLimits) -> None:
    among_all = replace(drafting(limits, max_num_batched_tokens=512), refined_candidates=0)
    kept = 256 * 7 * ((2 * VOCABULARY + 128) * 2 + 38 * 12)
    assert refining(among_all)[1] == kept
    with_candidates = replace(among_all, refined_candidates=None)
    more = activation_bytes(among_all, Parallelism()) - activation_bytes(with_candidates, Parallelism())
    assert more == kept > GIB


def test_the_profiling_run_refines(limits: EngineLimits) -> None:
    refined, plain = drafting(limits), drafting(limits, PLAIN)
    assert activation_bytes(refined, Parallelism()) > activation_bytes(plain, Parallelism())
