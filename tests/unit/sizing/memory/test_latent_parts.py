"""What Triton's latent attention reserves on Ampere is counted; elsewhere other kernels serve."""

from dataclasses import replace
from typing import Any

import pytest

from specdecode_operator.sizing.arithmetic import GIB
from specdecode_operator.sizing.catalogue import find_geometry
from specdecode_operator.sizing.devices import find_device
from specdecode_operator.sizing.memory.activation import latent_parts_bytes, on_product
from specdecode_operator.sizing.memory.budget import Budget, estimate
from specdecode_operator.sizing.pair import Pair
from tests.unit.sizing.conftest import PairFactory

A100, H200, LATENT, TRITON = "NVIDIA-A100-SXM4-80GB", "NVIDIA-H200", "deepseek-ai/DeepSeek-V2-Lite", "TRITON_MLA"


def alone(make_pair: PairFactory, model: str = LATENT, **limits: Any) -> Pair:
    geometry = find_geometry(model)
    assert geometry is not None
    settings = {
        "max_model_len": 32_768,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 2048,
        "engine_version": "0.33.0",
    }
    return replace(make_pair("BF16", None, **settings | limits), target=geometry)


def on(pair: Pair, product: str, tensor: int = 1) -> Budget:
    device = find_device(product)
    assert device is not None
    return estimate(pair, device, tensor)


@pytest.mark.parametrize(
    ("length", "tensor", "tokens", "gib"),
    [
        # 256 requests, 64 parts of the context, 16 heads, 513 numbers of 4 bytes
        (32_768, 1, 0, 256 * 64 * 16 * 513 * 4 / GIB),
        (32_768, 1, 3, 4 * 256 * 64 * 16 * 513 * 4 / GIB),
        (32_768, 2, 3, 4 * 256 * 64 * 8 * 513 * 4 / GIB),
        (131_072, 1, 0, 256 * 216 * 16 * 513 * 4 / GIB),
    ],
    ids=["alone", "with drafts", "on two GPUs", "no more parts than the GPU has room for"],
)
def test_what_is_reserved_on_ampere(make_pair: PairFactory, length: int, tensor: int, tokens: int, gib: float) -> None:
    pair = replace(alone(make_pair, max_model_len=length), num_speculative_tokens=tokens)
    assert latent_parts_bytes(on_product(pair, A100), tensor) / GIB == gib


def test_from_0_33_on_the_workspace_of_experts_is_as_large_at_least(make_pair: PairFactory) -> None:
    """0.5 GiB in place of the 0.26 GiB that 2048 tokens at 6 experts take: it is one workspace."""
    pair = alone(make_pair)
    with_triton = on(pair, A100).activation_bytes - on(replace_backend(pair, "FLASHMLA"), A100).activation_bytes
    experts = 2048 * 6 * (2 * 1408 + 2048) * 2
    assert with_triton == 256 * 64 * 16 * 513 * 4 - experts
    many = alone(make_pair, max_num_batched_tokens=16_384)
    assert on(many, A100).activation_bytes == on(replace_backend(many, "FLASHMLA"), A100).activation_bytes


def test_before_it_grows_after_the_profiling_run(make_pair: PairFactory) -> None:
    """So that the KV cache has as much, and less is free outside the budget."""
    pair = alone(make_pair, engine_version="0.32.0")
    triton, other = on(pair, A100), on(replace_backend(pair, "FLASHMLA"), A100)
    assert triton.available_kv_bytes == other.available_kv_bytes
    assert other.slack_bytes - triton.slack_bytes == 256 * 64 * 16 * 513 * 4 - 2048 * 6 * (2 * 1408 + 2048) * 2


def test_other_gpus_and_other_attention_reserve_nothing(make_pair: PairFactory) -> None:
    latent, dense = alone(make_pair), alone(make_pair, "Qwen/Qwen3-8B")
    assert on_product(latent, H200) is latent
    assert on_product(dense, A100) is dense
    assert latent_parts_bytes(latent, 1) == 0


def test_who_asks_for_it_has_it_elsewhere_too(make_pair: PairFactory) -> None:
    asked = replace_backend(alone(make_pair), TRITON)
    assert on_product(asked, H200) is asked
    assert latent_parts_bytes(asked, 1) == latent_parts_bytes(on_product(alone(make_pair), A100), 1) > 0


def replace_backend(pair: Pair, backend: str) -> Pair:
    return replace(pair, limits=replace(pair.limits, attention_backend=backend))
