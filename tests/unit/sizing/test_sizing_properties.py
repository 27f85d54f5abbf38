"""What must hold for every pair, whatever its numbers."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from specdecode_operator.enums import Method, Precision
from specdecode_operator.sizing.arithmetic import GIB, gib_to_bytes
from specdecode_operator.sizing.catalogue import find_geometry
from specdecode_operator.sizing.devices import Device
from specdecode_operator.sizing.families.architectures import geometry_from_config, head_from_config
from specdecode_operator.sizing.geometry import ModelGeometry
from specdecode_operator.sizing.memory.budget import Budget, EngineLimits, Pair, Verdict, estimate, estimate_on_cpu
from specdecode_operator.sizing.pair import without_speculation
from specdecode_operator.sizing.placement import GpuPool
from specdecode_operator.sizing.quantization_matrix import quantization_matrix
from specdecode_operator.sizing.rank_layers import Split
from specdecode_operator.sizing.tensor_parallel import tensor_problems
from specdecode_operator.sizing.weights import weight_bytes
from specdecode_operator.vllm.versions import SIZED_VERSIONS

# A busy machine is no failure: no deadlines, and slow generation is fine.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
# A matrix is hundreds of estimates.
few = settings(unhurried, max_examples=15)

ORDER = [Verdict.DOES_NOT_FIT, Verdict.TIGHT, Verdict.FITS]

PRODUCTS = ["NVIDIA-H100-80GB-HBM3", "NVIDIA-H200"]
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "vocab_size": 128_256,
}

geometries = st.builds(
    lambda layers, heads, kv, head_dim, intermediate, vocabulary, tied: geometry_from_config(
        "generated",
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": heads * 128,
            "intermediate_size": intermediate * 1024,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": min(kv, heads),
            "head_dim": head_dim,
            "vocab_size": vocabulary,
            "max_position_embeddings": 131_072,
            "tie_word_embeddings": tied,
        },
    ),
    layers=st.integers(1, 100),
    heads=st.sampled_from([8, 16, 32, 64]),
    kv=st.sampled_from([1, 2, 4, 8, 64]),
    head_dim=st.sampled_from([64, 128]),
    intermediate=st.integers(1, 40),
    vocabulary=st.integers(1, 300_000),
    tied=st.booleans(),
)
limits = st.builds(
    EngineLimits,
    max_model_len=st.integers(1, 131_072),
    max_num_seqs=st.integers(1, 2048),
    max_num_batched_tokens=st.integers(2048, 16_384),
    block_size=st.sampled_from([16, 32, 128]),
    kv_cache_element_bytes=st.sampled_from([None, 1]),
    memory_utilization_percent=st.integers(1, 100),
    enforce_eager=st.booleans(),
    min_concurrency=st.integers(1, 64),
)
pairs = st.builds(
    Pair,
    target=geometries,
    target_precision=st.sampled_from(Precision),
    draft=geometries,
    draft_precision=st.sampled_from(Precision),
    method=st.just("draft_model"),
    num_speculative_tokens=st.integers(1, 8),
    limits=limits,
)
devices = st.builds(Device, st.just("GPU"), st.integers(1, 200).map(lambda gib: gib * GIB), st.just("generated"))
tensors = st.sampled_from([1, 2, 4, 8])


def _budget(pair: Pair, device: Device, tensor: int) -> Budget:
    problems = tensor_problems(pair.target, tensor, pair.target_precision)
    if pair.draft is not None:
        problems += tensor_problems(pair.draft, tensor, pair.draft_precision)
    assume(not problems)
    return estimate(pair, device, tensor)


@unhurried
@given(pairs, devices, tensors)
def test_budget_terms_add_up(pair: Pair, device: Device, tensor: int) -> None:
    budget = _budget(pair, device, tensor)
    terms = (
        budget.target_weights_bytes,
        budget.draft_weights_bytes,
        budget.state_bytes,
        budget.activation_bytes,
        budget.cuda_graphs_bytes,
        budget.non_torch_bytes,
    )
    assert all(term >= 0 for term in terms)
    assert budget.requested_bytes - sum(terms) == budget.available_kv_bytes
    assert budget.requested_bytes <= budget.total_bytes
    assert budget.num_blocks * pair.limits.block_size * budget.kv_bytes_per_token <= max(0, budget.available_kv_bytes)
    assert (budget.verdict is Verdict.FITS) == (budget.binding_term is None)


TARGETS_AND_DRAFTS = [
    ("meta-llama/Llama-3.1-8B", Method.NONE, None),
    ("meta-llama/Llama-3.1-8B", Method.NGRAM, None),
    ("meta-llama/Llama-3.1-8B", Method.NGRAM_GPU, None),
    ("meta-llama/Llama-3.1-8B", Method.SUFFIX, None),
    ("meta-llama/Llama-3.1-8B", Method.DRAFT_MODEL, "meta-llama/Llama-3.2-1B"),
    ("meta-llama/Llama-3.1-8B", Method.EAGLE, "yuhuili/EAGLE-LLaMA3-Instruct-8B"),
    ("meta-llama/Llama-3.1-8B", Method.EAGLE3, "sgl-project/SpecForge:configs/llama3-8B-eagle3.json"),
    ("Qwen/Qwen3-8B", Method.DFLASH, "sgl-project/SpecForge:configs/qwen3-8b-dflash.json"),
    ("Qwen/Qwen3-8B", Method.DSPARK, "linked"),
    ("lmsys/vicuna", Method.MEDUSA, "several"),
    ("Qwen/Qwen3.5-27B", Method.MTP, None),
]
OWN = {
    "linked": head_from_config(
        "linked",
        CONFIG
        | {"architectures": ["DSparkDraftModel"], "model_type": "qwen3", "num_hidden_layers": 2, "markov_rank": 16}
        | {"vocab_size": 151_936, "target_layer_ids": [1, 9, 17]},
        Method.DSPARK,
    ),
    "several": head_from_config(
        "several", {"architectures": ["MedusaModel"], "hidden_size": 4096, "medusa_num_heads": 7}, Method.MEDUSA
    ),
    "lmsys/vicuna": geometry_from_config("vicuna", CONFIG),
}


def _drafting(
    named: tuple[str, Method, str | None],
    tokens: int,
    version: str,
    limits: EngineLimits,
    *,
    adaptive: bool,
    chance: bool,
    entropy: bool,
) -> Pair:
    target, method, draft = named
    models = [None if each is None else OWN.get(each) or find_geometry(each) for each in (target, draft)]
    assert models[0] is not None
    return Pair(
        models[0],
        Precision.BF16,
        models[1],
        Precision.BF16 if draft else None,
        method.value,
        0 if method is Method.NONE else tokens,
        replace(limits, engine_version=version),
        samples_drafts=chance,
        adaptive_verification=adaptive and method is not Method.NONE,
        checks_by_entropy=entropy and method is not Method.NONE,
    )


@unhurried
@given(
    st.builds(
        _drafting,
        st.sampled_from(TARGETS_AND_DRAFTS),
        st.integers(1, 7),
        st.sampled_from(SIZED_VERSIONS),
        limits,
        adaptive=st.booleans(),
        entropy=st.booleans(),
        chance=st.booleans(),
    ),
    devices,
    tensors,
)
def test_budget_terms_of_every_method_and_version_add_up(pair: Pair, device: Device, tensor: int) -> None:
    budget = _budget(pair, device, tensor)
    charged = (budget.state_bytes, budget.activation_bytes, budget.cuda_graphs_bytes, budget.non_torch_bytes)
    assert all(term >= 0 for term in (*charged, budget.overrun_bytes, budget.draft_weights_bytes))
    assert budget.requested_bytes - budget.weights_bytes - sum(charged) == budget.available_kv_bytes
    assert (budget.verdict is Verdict.FITS) == (budget.binding_term is None)
    alone = _budget(without_speculation(pair), device, tensor)
    assert alone.weights_bytes <= budget.weights_bytes
    assert alone.effective_batch >= budget.effective_batch


@unhurried
@given(pairs, st.integers(1, 10**12), st.integers(0, 10**12))
def test_budget_terms_add_up_on_cpu(pair: Pair, memory_bytes: int, kv_cache_bytes: int) -> None:
    budget = estimate_on_cpu(pair, memory_bytes, kv_cache_bytes)
    terms = budget.weights_bytes + budget.state_bytes + budget.activation_bytes + budget.cuda_graphs_bytes
    assert budget.requested_bytes - terms - budget.non_torch_bytes == budget.available_kv_bytes == kv_cache_bytes


@unhurried
@given(pairs, devices, st.integers(0, 100 * GIB), tensors)
def test_more_memory_never_gives_fewer_tokens(pair: Pair, device: Device, more_bytes: int, tensor: int) -> None:
    # At 100 % what is free at start decides, and that grows too.
    small = _budget(pair, device, tensor)
    large = _budget(pair, replace(device, total_bytes=device.total_bytes + more_bytes), tensor)
    assert large.kv_cache_tokens >= small.kv_cache_tokens
    assert ORDER.index(large.verdict) >= ORDER.index(small.verdict)


@unhurried
@given(pairs, devices, tensors)
def test_draft_never_adds_kv_cache_tokens(pair: Pair, device: Device, tensor: int) -> None:
    alone = replace(pair, draft=None, draft_precision=None, method="none", num_speculative_tokens=0)
    with_draft = _budget(pair, device, tensor)
    without = _budget(alone, device, tensor)
    assert with_draft.kv_cache_tokens <= without.kv_cache_tokens
    assert ORDER.index(with_draft.verdict) <= ORDER.index(without.verdict)


@unhurried
@given(pairs, devices, tensors)
def test_fp8_kv_doubles_the_blocks_within_one(pair: Pair, device: Device, tensor: int) -> None:
    def blocks(element_bytes: int | None) -> int:
        changed = replace(pair, limits=replace(pair.limits, kv_cache_element_bytes=element_bytes))
        return _budget(changed, device, tensor).num_blocks

    assert blocks(1) - 2 * blocks(None) in (0, 1)


@unhurried
@given(geometries, st.sampled_from(Precision), tensors)
def test_more_tensor_ranks_never_increase_rank_weights(
    geometry: ModelGeometry, precision: Precision, tensor: int
) -> None:
    assume(not tensor_problems(geometry, tensor, precision) and not tensor_problems(geometry, 2 * tensor, precision))
    assert weight_bytes(geometry, precision, Split(2 * tensor)) <= weight_bytes(geometry, precision, Split(tensor))


@unhurried
@given(geometries, tensors)
def test_fewer_bits_give_fewer_weight_bytes(geometry: ModelGeometry, tensor: int) -> None:
    assume(not tensor_problems(geometry, tensor, Precision.INT4))
    sizes = [weight_bytes(geometry, precision, Split(tensor)) for precision in Precision]
    assert sizes[0] > sizes[1] == sizes[2] > sizes[3]


@unhurried
@given(pairs, devices, tensors, st.integers(1, 131_072))
def test_shorter_max_model_len_never_fits_worse(pair: Pair, device: Device, tensor: int, length: int) -> None:
    shorter = replace(pair, limits=replace(pair.limits, max_model_len=min(length, pair.limits.max_model_len)))
    before, after = _budget(pair, device, tensor), _budget(shorter, device, tensor)
    assert ORDER.index(after.verdict) >= ORDER.index(before.verdict)


@few
@given(pairs, st.permutations([GpuPool(product, count) for product in PRODUCTS for count in (2, 8)]))
def test_order_of_gpu_pools_is_irrelevant(pair: Pair, pools: list[GpuPool]) -> None:
    in_order = sorted(pools, key=lambda pool: (pool.product, pool.gpus_per_node))
    assert quantization_matrix(pair, pools, tensor=1) == quantization_matrix(pair, in_order, tensor=1)


@given(st.permutations(list(CONFIG)))
def test_order_of_config_keys_is_irrelevant(keys: list[str]) -> None:
    shuffled, written = (
        geometry_from_config("generated", {key: CONFIG[key] for key in order}) for order in (keys, CONFIG)
    )
    assert shuffled.layers == written.layers
    assert weight_bytes(shuffled, Precision.BF16, Split(2)) == weight_bytes(written, Precision.BF16, Split(2))


@given(st.integers(0, 2**20), st.integers(0, 1023))
def test_gib_to_bytes_is_exact_and_reversible(gib: int, parts: int) -> None:
    """A size in 1024ths of a GiB is exact; a GB is 7 % less than a GiB."""
    size_bytes = gib_to_bytes(gib + parts / 1024)
    assert size_bytes == gib * 2**30 + parts * 2**20
    assert gib_to_bytes(size_bytes / GIB) == size_bytes
    assert size_bytes >= (gib * 10**9) * 1.073


@pytest.mark.parametrize("precision", list(Precision))
def test_precision_values_equal_their_names(precision: Precision) -> None:
    assert precision.value == precision.name
