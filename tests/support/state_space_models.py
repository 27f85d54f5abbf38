"""Models with Mamba layers: of the catalogue by their ids, others by a short name."""

from typing import Any

from specdecode_operator.sizing.catalogue import find_geometry
from specdecode_operator.sizing.families.architectures import geometry_from_config
from specdecode_operator.sizing.geometry import ModelGeometry

NANO = "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"
NANO_FP4 = "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4"
ULTRA = "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16"
H56 = "nvidia/Nemotron-H-56B-Base-8K"

GRANITE: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "hidden_size": 1536,
    "intermediate_size": 512,
    "layer_types": ["mamba"] * 5 + (["attention"] + ["mamba"] * 9) * 3 + ["attention"] + ["mamba"] * 4,
    "mamba_d_head": 32,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_n_heads": 96,
    "max_position_embeddings": 131072,
    "num_attention_heads": 12,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 40,
    "num_key_value_heads": 4,
    "num_local_experts": 64,
    "position_embedding_type": "nope",
    "shared_intermediate_size": 1024,
    "tie_word_embeddings": True,
    "vocab_size": 100352,
}
GRANITE_DENSE = GRANITE | {
    "hidden_size": 2048,
    "mamba_d_head": 64,
    "mamba_n_heads": 64,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 0,
    "shared_intermediate_size": 8192,
}
GRANITE_WITHOUT_STATES = GRANITE_DENSE | {"layer_types": ["attention"] * 40, "position_embedding_type": "rope"}
FALCON: dict[str, Any] = {
    "architectures": ["FalconH1ForCausalLM"],
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "mamba_d_head": 64,
    "mamba_d_ssm": 3072,
    "mamba_d_state": 256,
    "mamba_n_groups": 1,
    "mamba_n_heads": 48,
    "mamba_rms_norm": False,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rope_theta": 100000000000.0,
    "tie_word_embeddings": False,
    "vocab_size": 65537,
}
FALCON_NORMED = FALCON | {
    "mamba_d_head": "auto",
    "mamba_d_ssm": None,
    "mamba_n_groups": 2,
    "mamba_n_heads": 64,
    "mamba_rms_norm": True,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}
MAMBA2: dict[str, Any] = {
    "architectures": ["Mamba2ForCausalLM"],
    "head_dim": 64,
    "hidden_size": 4096,
    "n_groups": 8,
    "num_heads": 128,
    "num_hidden_layers": 64,
    "state_size": 128,
    "tie_word_embeddings": False,
    "vocab_size": 32768,
}
JAMBA: dict[str, Any] = {
    "architectures": ["JambaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "mamba_dt_rank": 256,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 65536,
}
JAMBA_DENSE = JAMBA | {
    "attn_layer_offset": 7,
    "attn_layer_period": 14,
    "hidden_size": 2560,
    "intermediate_size": 8192,
    "mamba_dt_rank": "auto",
    "num_attention_heads": 20,
    "num_experts": 1,
    "num_hidden_layers": 28,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}
LLAMA_DRAFT: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 262144,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 131072,
}
MODELS = {
    "granite": GRANITE,
    "granite dense": GRANITE_DENSE,
    "granite without states": GRANITE_WITHOUT_STATES,
    "falcon": FALCON,
    "falcon normed": FALCON_NORMED,
    "mamba2": MAMBA2,
    "jamba": JAMBA,
    "jamba dense": JAMBA_DENSE,
}


def model(name: str) -> ModelGeometry:
    """Return the geometry of one of them."""
    if name in MODELS:
        return geometry_from_config(name, MODELS[name])
    geometry = find_geometry(name)
    assert geometry is not None
    return geometry
