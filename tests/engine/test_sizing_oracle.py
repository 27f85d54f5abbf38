"""Sizing against the real vLLM: weight bytes of every rank, and how the KV cache is divided, to the byte.

vLLM's own classes are built on the meta device for every model of the
catalogue and every split, and its own functions divide the cache (see
sizing_oracle.py). All layers are built: with process groups that only know
their size, a case takes a tenth of a second. What differs all the same follows
a rule of oracle_rules.py. Where vLLM refuses to start, sizing must refuse, and
the other way round. One model of each architecture and format is in the normal
run, the rest in `./just test-all`, where older versions are asked about those
of the normal run, too.

What this cannot show, because no kernel runs and no checkpoint is loaded:

- What the V2 model runner allocates: it is only asked for its KV cache specs
  and for how it loads drafts. Buffers, activations and CUDA graphs are not
  here. vLLM decides for V2 itself, with its lack of Triton hidden from it.
- Weights that are quantized while loading (``--quantization fp8``): the classes
  are built in 16 bits and converted later.
- Repacking after loading, such as Marlin's padding of experts and scales.
- Whether a checkpoint brings an embedding or an output head for its draft: the
  bytes after sharing are those of a head that takes from the target whatever
  has the same shape.
- What backends would choose for lack of FlashInfer, which is not pretended.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from specdecode_operator.sizing.geometry import LatentAttention, SelfAttention
from specdecode_operator.sizing.memory.kv_cache import (
    cache_layout,
    loads_encoder_everywhere,
    pool_blocks,
    pool_capacity,
    stage_parts,
)
from specdecode_operator.sizing.pair import loaded_draft
from specdecode_operator.sizing.rank_layers import Split
from specdecode_operator.sizing.version_rules import NEWEST_VERSION
from specdecode_operator.sizing.weights import copied_bytes, loaded_head_bytes, weight_bytes
from tests.engine.differences import assert_none, differing_terms
from tests.engine.oracle_batches import Batch, Subjects, Truth, subjects
from tests.engine.oracle_cases import (
    BLOCK_SIZE,
    ESTIMATED,
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    SPACE_BYTES,
    Case,
    distinct_targets,
    precision_of,
)
from tests.engine.oracle_rules import meant_difference_bytes, refusal_differs
from tests.engine.recorded_answers import answers, recorded

UNSIZED = {
    "Qwen/Qwen3-32B-FP8-Static-PerTensor": "quant_method: is missing",
    "sgl-project/SpecForge:configs/glm-5.2-dspark.json": "markov_rank: is missing",
    "sgl-project/SpecForge:configs/inkling-dspark.json": "markov_rank: is missing",
    "sgl-project/SpecForge:configs/kimi-k3-dspark.json": "markov_rank: is missing",
    "sgl-project/SpecForge:configs/qwen3-4b-dspark.json": "markov_rank: is missing",
    "sgl-project/SpecForge:configs/qwen3-8b-domino.json": "vLLM does not know this draft",
    "sgl-project/SpecForge:configs/qwen3-8b-dspark.json": "markov_rank: is missing",
    "sgl-project/SpecForge:configs/qwen3-8b-peagle.json": "vLLM does not start with an unconverted P-EAGLE",
    "sgl-project/SpecForge:configs/qwen3.5-4b-domino.json": "vLLM does not know this draft",
    "sgl-project/SpecForge:configs/qwen3.6-27b-domino-full-attention.json": "vLLM does not know this draft",
    "sgl-project/SpecForge:configs/qwen3.6-27b-dspark.json": "markov_rank: is missing",
    "torchspec-project/TorchSpec:torchspec/config/dflash_draft_config.json": "vLLM does not support this type",
}
"""Files of the catalogue that sizing refuses, and what it says of each."""


@pytest.fixture(params=[pytest.param(True, id="quick"), pytest.param(False, id="rest", marks=pytest.mark.long)])
def asked(request: pytest.FixtureRequest, truth: Truth) -> Subjects:
    """Return what is asked in every run, then the rest."""
    if not request.param and truth.version != NEWEST_VERSION:
        pytest.skip("the newest version alone is asked about all")
    return subjects(quick=request.param, version=truth.version)


Compare = Callable[[Case, Any], Iterator[str]]
"""How a case and vLLM's answer differ, a text for each term."""


def compare(batches: tuple[Batch, ...], truth: Truth, how: Compare) -> None:
    """Fail with every case, and every term of it, that differs where vLLM starts."""
    assert_none(
        f"{case}: {difference}"
        for batch in batches
        for case, answer in truth.of(batch).items()
        if "error" not in answer
        for difference in how(case, answer)
    )


def our_weights(case: Case) -> list[int]:
    """Return what sizing says a rank of each stage holds of the target's weights, before the files are loaded."""
    target, everywhere = case.geometry, loads_encoder_everywhere(case.pair())
    return [
        weight_bytes(target, precision_of(target), case.split.layer_split, stage=stage, encoder_everywhere=everywhere)
        + meant_difference_bytes(case, stage)
        for stage in case.stages
    ]


def its_weights(answer: dict[str, Any]) -> list[int]:
    """Return the bytes of the parameters of vLLM's classes, by stage."""
    return [stage["target_param_bytes"] for stage in answer["stages"]]


def our_draft(case: Case) -> tuple[int, int]:
    """Return what sizing says the draft takes: as constructed, and once it shares what the target has."""
    loaded = loaded_draft(case.pair())
    assert loaded is not None
    draft, precision = loaded
    whole = weight_bytes(draft, precision, Split(case.tensor))
    return whole, loaded_head_bytes(draft, precision, Split(case.tensor)) if draft.head is not None else whole


def our_cache(case: Case, answer: dict[str, Any]) -> dict[str, Any]:
    """Return what sizing makes of the space, with the block size that the engine's attention chose."""
    mixers = [mixer for layer in case.geometry.layers for mixer in layer.mixers]
    has_states = not all(isinstance(mixer, SelfAttention | LatentAttention) for mixer in mixers)
    # States make the engine raise the size itself, by a rule that sizing follows.
    pair = case.pair(BLOCK_SIZE if has_states else answer["settings"]["block_size"])
    layout = cache_layout(pair, case.split)
    num_blocks = pool_blocks(layout, [SPACE_BYTES] * case.pipeline)
    capacity = pool_capacity(layout[0], num_blocks, case.max_model_len)
    return {
        "groups": [sorted((group.num_layers, group.block_bytes) for group in stage.groups) for stage in layout],
        "num_blocks": num_blocks,
        "tokens": capacity.tokens,
        "concurrency": capacity.max_concurrency,
    }


def its_cache(answer: dict[str, Any]) -> dict[str, Any]:
    """Return what vLLM made of the space, in the same words."""
    kv = answer["kv"][0]
    return {
        "groups": [sorted(map(its_group, stage)) for stage in kv["groups"]],
        "num_blocks": kv["num_blocks"],
        "tokens": kv["tokens"],
        "concurrency": kv["concurrency"],
    }


def its_group(group: list[Any]) -> tuple[int, int]:
    """Return the layers of a group and the bytes of its block: layers of unequal pages come summed up."""
    kind, num_layers, page_bytes, _ = group
    return num_layers, page_bytes if kind.startswith("UniformType") else num_layers * page_bytes


def test_sizing_refuses_exactly_the_cases_that_vllm_refuses(asked: Subjects, truth: Truth) -> None:
    differing = {}
    for batch in asked.targets:
        for case, answer in truth.of(batch).items():
            differing[refusal_differs(case, "error" in answer)] = answer.get("error")
    differing.pop("", None)
    assert_none(f"{what}: {error}" for what, error in differing.items())


def weights_differ(case: Case, answer: Any) -> Iterator[str]:
    """Tell of the weights of every rank."""
    yield from differing_terms({"weights by stage": our_weights(case)}, {"weights by stage": its_weights(answer)})


def test_weights_of_every_rank_equal_vllm(asked: Subjects, truth: Truth) -> None:
    compare(asked.targets, truth, weights_differ)


def test_weights_with_expert_parallelism_equal_vllm(asked: Subjects, truth: Truth) -> None:
    refused = [case for batch in asked.spread for case, answer in truth.of(batch).items() if "error" in answer]
    assert refused == []
    compare(asked.spread, truth, weights_differ)


def tables_differ(case: Case, answer: Any) -> Iterator[str]:
    """Tell of the rotary tables."""
    buffers = answer["stages"][0]["target_buffer_bytes"]
    theirs = sum(size for name, size in buffers.items() if "cos_sin" in name)
    of_target, _ = stage_parts(case.pair(), case.split, 0)
    ours = of_target["rotary table"]
    yield from differing_terms({"rotary tables": ours}, {"rotary tables": theirs})


def test_rotary_tables_equal_vllm(asked: Subjects, truth: Truth) -> None:
    compare(asked.targets, truth, tables_differ)


def cache_differs(case: Case, answer: Any) -> Iterator[str]:
    """Tell of the division of the KV cache."""
    yield from differing_terms(our_cache(case, answer), its_cache(answer))


def test_kv_cache_division_equals_vllm(asked: Subjects, truth: Truth) -> None:
    compare(asked.targets, truth, cache_differs)


def draft_differs(case: Case, answer: Any) -> Iterator[str]:
    """Tell of the draft's weights, before and after it shares what the target has, and of the cache of both."""
    last = answer["stages"][-1]
    theirs = (last["draft_param_bytes"], last["draft_unshared_param_bytes"])
    yield from differing_terms({"draft": our_draft(case)}, {"draft": theirs})
    loaded = loaded_draft(case.pair())
    copied = copied_bytes(loaded[0], case.tensor) if loaded else 0
    yield from differing_terms({"copies": copied}, {"copies": last["draft_copied_bytes"]})
    yield from cache_differs(case, answer)


def test_draft_weights_and_cache_equal_vllm(asked: Subjects, truth: Truth) -> None:
    answers = {case: answer for batch in asked.drafted for case, answer in truth.of(batch).items()}
    assert_none(
        f"{case}: {answer.get('error', 'starts')}"
        for case, answer in answers.items()
        if case.refused_by_sizing() != ("error" in answer)
    )
    compare(asked.drafted, truth, draft_differs)


def test_recorded_answers_are_up_to_date_with_vllm(newest_truth: Truth) -> None:
    """The unit tests ask the record: write it anew with `python -m tests.engine.recorded_answers`."""
    found, kept = answers(newest_truth), recorded()
    assert_none(sorted(found.keys() ^ kept.keys()))
    assert_none(f"{case}: {kept[case]} recorded, {found[case]} now" for case in found if found[case] != kept[case])


def test_unsized_catalogue_models_are_listed_with_reason() -> None:
    found = {model: why for model, why in distinct_targets().items() if why not in ("", ESTIMATED)}
    assert found.keys() == UNSIZED.keys()
    assert [model for model, why in found.items() if UNSIZED[model] not in why] == []


def test_oracle_vllm_chooses_gpu_settings(truth: Truth) -> None:
    quick = subjects(quick=True, version=truth.version)
    batch = next(batch for batch in quick.targets if batch.name == "llama, fp8 block")
    settings = next(iter(truth.of(batch).values()))["settings"]
    chosen = {key: settings[key] for key in ("runner", "max_num_seqs", "max_num_batched_tokens", "block_size", "async")}
    assert chosen == {
        "runner": "V2",
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
        "block_size": BLOCK_SIZE,
        "async": True,
    }
