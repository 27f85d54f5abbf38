"""Make two LoRA adapters of a tiny Llama model; runs in the engine's Python.

    python tiny_adapters.py FOLDER

Nothing is trained: the matrices are random, and large enough to change what the model says.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.append(str(Path(__file__).parents[2] / "examples"))

import tiny_pair as tiny

ADAPTERS = {"first": 8, "second": 12}
"""Rank by name."""

_SCALE = 0.3
_LAYERS = {
    "self_attn.q_proj": (tiny.HIDDEN, tiny.HEADS * tiny.HEAD_DIM),
    "self_attn.v_proj": (tiny.HIDDEN, tiny.KV_HEADS * tiny.HEAD_DIM),
    "mlp.down_proj": (tiny.INTERMEDIATE, tiny.HIDDEN),
}
"""Adapted layers, each with its inputs and outputs."""


def main(folder: Path) -> None:
    """Write each adapter below a folder, as PEFT does."""
    generator = torch.Generator().manual_seed(0)
    for name, rank in ADAPTERS.items():
        weights = {}
        for layer in range(tiny.TARGET_LAYERS):
            for module, (inputs, outputs) in _LAYERS.items():
                prefix = f"base_model.model.model.layers.{layer}.{module}"
                weights[f"{prefix}.lora_A.weight"] = _SCALE * torch.randn(rank, inputs, generator=generator)
                weights[f"{prefix}.lora_B.weight"] = _SCALE * torch.randn(outputs, rank, generator=generator)
        config = {
            "peft_type": "LORA",
            "base_model_name_or_path": "tiny",
            "task_type": "CAUSAL_LM",
            "r": rank,
            "lora_alpha": rank,
            "target_modules": [module.rpartition(".")[2] for module in _LAYERS],
        }
        place = folder / name
        place.mkdir(parents=True)
        (place / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        save_file(
            {key: value.to(torch.bfloat16) for key, value in weights.items()}, place / "adapter_model.safetensors"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
