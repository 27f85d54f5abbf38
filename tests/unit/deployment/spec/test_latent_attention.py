"""What Triton's latent attention reserves on Ampere is told; elsewhere other kernels serve."""

from typing import Any

import pytest

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.deployment.spec.validation import valid_facts
from specdecode_operator.deployment.spec.warnings import plan_warnings

A100, H200, LATENT = "NVIDIA-A100-SXM4-80GB", "NVIDIA-H200", "deepseek-ai/DeepSeek-V2-Lite"


def told(model: str, product: str, tensor: int, **spec: Any) -> list[str]:
    body = {"target": {"model": model}, "accelerator": {"product": [product]}, **spec}
    found = plan_warnings(valid_facts(SpecDecodeDeploymentSpec.parse(body)), {}, tensor)
    return [warning for warning in found if "latent attention" in warning]


@pytest.mark.parametrize(
    ("length", "tensor", "speculation", "gib"),
    [
        # 256 requests, 64 parts of the context, 16 heads, 513 numbers of 4 bytes
        (32_768, 1, {}, "0.5 GiB"),
        (32_768, 1, {"speculation": {"method": "ngram", "numSpeculativeTokens": 3}}, "2.0 GiB"),
        (32_768, 2, {"speculation": {"method": "ngram", "numSpeculativeTokens": 3}}, "1.0 GiB"),
        (131_072, 1, {}, "1.7 GiB"),
    ],
    ids=["alone", "with drafts", "on two GPUs", "no more parts than the GPU has room for"],
)
def test_what_is_reserved_on_ampere_is_told(length: int, tensor: int, speculation: dict[str, Any], gib: str) -> None:
    (warning,) = told(LATENT, A100, tensor, serving={"maxModelLen": length, "maxNumSeqs": 256}, **speculation)
    assert f"reserves {gib} on each {A100}" in warning


def test_other_gpus_and_other_attention_reserve_nothing() -> None:
    assert not told(LATENT, H200, 1)
    assert not told("Qwen/Qwen3-8B", A100, 1)
