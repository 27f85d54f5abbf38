"""What vLLM sets by itself for latent attention on CPU is told: whatever was asked, the engine runs otherwise."""

from typing import Any

import pytest

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.deployment.validation import valid_facts
from specdecode_operator.deployment.warnings import plan_notes

LATENT = "deepseek-ai/DeepSeek-V2-Lite"
CPU = {"type": "CPU", "kvCacheGiB": 4, "memoryGiB": 64, "cpuCores": 8}


def told(model: str = LATENT, version: str = "0.33", accelerator: dict[str, Any] = CPU, **serving: Any) -> list[str]:
    body = {
        "target": {"model": model},
        "accelerator": accelerator,
        "engine": {"version": version, "image": "registry.local/vllm:1"},
        "serving": {"blockSize": 128, "maxModelLen": 4096, **serving},
    }
    notes = plan_notes(valid_facts(SpecDecodeDeploymentSpec.parse(body)))
    return [note for note in notes if "latent attention" in note]


@pytest.mark.parametrize(
    ("version", "where"), [("0.28", "on CPU:"), ("0.29", "on a CPU without AMX:"), ("0.33", "on a CPU without AMX:")]
)
def test_blocks_and_steps_are_the_engine_s_own_on_cpu(version: str, where: str) -> None:
    (note,) = told(version=version)
    assert note.startswith(f"latent attention {where} vLLM {version} takes blocks of 16 tokens and steps of 4096,")


def test_a_step_has_2048_tokens_at_least() -> None:
    (note,) = told(maxModelLen=1024)
    assert "steps of 2048," in note


def test_it_is_of_no_other_model_and_no_gpu() -> None:
    assert told("Qwen/Qwen3-8B") == []
    assert told(accelerator={"products": ["NVIDIA-H200"]}, blockSize=64) == []
