"""Pairs that people serve, none of them in the catalogue: the plan reads them from the hub, as a user asks for it.

Their ids and methods are those of public manifests of 2026. The config.json of a known model stands for that of the
build, with the quantization_config that its tool writes; headers hold one tensor for each part of the model.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.sizing.catalogue import find_entry
from tests.support.checkpoints import header, safetensors
from tests.support.http_server import serving
from tests.support.loopback_hub import Hub
from tests.unit.cli.conftest import Specdecode, WriteObject, manifest

GIB = 2**30


def known(model: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a model in the catalogue, changed."""
    entry = find_entry(model)
    assert entry is not None
    return {**entry.config, **changes}


def repository(config: dict[str, Any], **parts_gib: float) -> dict[str, bytes]:
    """Files of a model: a header for parts of so many GiB, without the data."""
    shapes = {name.replace("__", "."): ("BF16", [int(size * GIB) // 2]) for name, size in parts_gib.items()}
    files = {"config.json": json.dumps(config).encode()}
    return files | ({"model.safetensors": safetensors(header(shapes)[0], 0)} if shapes else {"pytorch_model.bin": b""})


TABLES = {"model__embed_tokens__weight": 2.4, "lm_head__weight": 2.4}
AUTOROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "packing_format": "auto_round:auto_gptq"}
MIXED = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "ignore": ["lm_head", "mtp*"],
    "config_groups": {
        "group_0": {
            "weights": {"num_bits": 4, "type": "float"},
            "targets": [f"model.layers.{n}.mixer.experts.{e}.up_proj" for n in range(40) for e in range(512)],
        }
    },
}
FP8_AND_NVFP4 = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "config_groups": {
        "attention": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}, "targets": ["re:.*attn.*"]},
        "mlp": {"weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group"}, "targets": ["re:.*mlp.*"]},
    },
}
HEAD_70B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 6144,
    "target_hidden_size": 8192,
    "num_hidden_layers": 1,
    "intermediate_size": 16_384,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "draft_vocab_size": 32_000,
    "max_position_embeddings": 2048,
}
DSPARK = known("RedHatAI/Kimi-K3-speculator.dspark")
LAYERS = {key: DSPARK[key] for key in ("head_dim", "intermediate_size", "max_position_embeddings", "model_type")}
SPECULATOR = {
    "architectures": ["DSparkDraftModel"],
    "speculators_model_type": "dspark",
    "aux_hidden_state_layer_ids": [3, 18, 33, 48, 63],
    "markov_rank": 256,
    "mask_token_id": 248_070,
    "transformer_layer_config": LAYERS
    | {"hidden_size": 5120, "num_hidden_layers": 5, "num_attention_heads": 32, "num_key_value_heads": 8}
    | {"vocab_size": 248_320},
}
DFLASH2 = known("z-lab/Qwen3.8-27B-DFlash2")
SWA = {"layer_types": ["sliding_attention"] * 5, "sliding_window": 2048, "hidden_size": 4096, "vocab_size": 154_880}
REPOSITORIES = {
    "nvidia/Llama-3.3-70B-FP8": repository(known("nvidia/Llama-3.3-70B-Instruct-FP8"), model__layers__0__all=66.0),
    "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B": repository(HEAD_70B),
    "Frozenlock/Qwen3.8-27B-int4-AutoRound": repository(
        known("Qwen/Qwen3.8-27B", quantization_config=AUTOROUND), **TABLES, model__layers__0__all=12.5
    ),
    "nvidia/Puzzle-75B-A9B-NVFP4": repository(
        known(
            "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4",
            architectures=["NemotronHPuzzleForCausalLM"],
            quantization_config=MIXED,
        ),
        model__embeddings__weight=1.0,
        model__layers__0__all=43.0,
        mtp__layers__0__all=5.3,
    ),
    "RedHatAI/Qwen3.8-27B-NVFP4": repository(
        known("Qwen/Qwen3.8-27B", quantization_config=FP8_AND_NVFP4), **TABLES, model__layers__0__all=17.0
    ),
    "RedHatAI/Qwen3.8-27B-speculator.dspark": repository(SPECULATOR, layers__0__all=3.4),
    "zai-org/GLM-5.3-Flash-BF16": repository(
        known("zai-org/GLM-5.3-Flash", quantization_config=None), **TABLES, model__layers__0__all=580.0
    ),
    "incoai/GLM-5.3-Flash-DFlash2": repository(DFLASH2 | SWA, layers__0__all=2.1),
}
PAIRS: dict[str, tuple[str | None, str, int, list[str]]] = {
    "nvidia/Llama-3.3-70B-FP8": ("yuhuili/EAGLE3-LLaMA3.3-Instruct-70B", "eagle3", 3, ["exact", "exact"]),
    "Frozenlock/Qwen3.8-27B-int4-AutoRound": (None, "mtp", 1, ["estimated"]),
    "nvidia/Puzzle-75B-A9B-NVFP4": (None, "mtp", 3, ["estimated"]),
    "RedHatAI/Qwen3.8-27B-NVFP4": ("RedHatAI/Qwen3.8-27B-speculator.dspark", "dspark", 8, ["estimated", "exact"]),
    "zai-org/GLM-5.3-Flash-BF16": ("incoai/GLM-5.3-Flash-DFlash2", "dflash", 7, ["estimated", "exact"]),
}


@pytest.fixture
def hub_of_pairs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving(Hub({}, REPOSITORIES)) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.mark.usefixtures("hub_of_pairs")
@pytest.mark.parametrize("target", PAIRS)
def test_a_pair_that_people_serve_gets_a_verdict(specdecode: Specdecode, write: WriteObject, target: str) -> None:
    draft, method, tokens, knowledge = PAIRS[target]
    speculation: dict[str, Any] = {"method": method, "numSpeculativeTokens": tokens}
    if draft is not None:
        speculation["draft"] = {"model": draft}
    path: Path = write("a.yaml", manifest("a", target={"model": target}, speculation=speculation, **EIGHT_H200))
    result = specdecode("plan", path, "--hub", "-o", "json")
    (found,) = json.loads(result.stdout)["objects"]
    assert [each["knowledge"] for each in found["models"]] == knowledge, result.output
    assert found["verdict"] in ("Fits", "Tight", "DoesNotFit")


EIGHT_H200: dict[str, Any] = {
    "engine": {"version": "0.33"},
    "accelerator": {"products": ["NVIDIA-H200"]},
    "parallelism": {"tensor": 8},
    "serving": {"maxModelLen": 32_768},
}
