"""Checkpoints as speculators writes them, with the smallest tensors that a check looks at."""

import json
import struct
from pathlib import Path
from typing import Any

from tests.support.objects import Body

VOCABULARY, HIDDEN, LAYERS = 16, 8, 6
METRICS = {"loss_epoch": 2.5, "full_acc_0_epoch": 0.75, "full_acc_1_epoch": 0.504, "cond_acc_0_epoch": 0.75}
Tensors = dict[str, tuple[str, list[int], bytes]]


def head_config(**changes: Any) -> Body:
    """config.json of an EAGLE-3 head."""
    layers = {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "intermediate_size": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"],
        "attention_bias": False,
        "mlp_bias": False,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "auto_map": {"": "config.Eagle3SpeculatorConfig"},
        "draft_vocab_size": VOCABULARY,
        "dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
        "norm_before_fc": True,
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "/models/of/the/pod"}},
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "transformer_layer_config": layers,
        **changes,
    }


def zeros(dtype: str, *shape: int) -> tuple[str, list[int], bytes]:
    """A tensor of zeros."""
    size = {"BF16": 2, "F16": 2, "F32": 4, "I64": 8, "BOOL": 1}[dtype]
    for edge in shape:
        size *= edge
    return dtype, list(shape), bytes(size)


def head_tensors(draft_vocabulary: int = VOCABULARY) -> Tensors:
    """Tensors of an EAGLE-3 head."""
    return {
        "embed_tokens.weight": zeros("BF16", VOCABULARY, HIDDEN),
        "fc.weight": zeros("BF16", HIDDEN, 3 * HIDDEN),
        "lm_head.weight": zeros("BF16", draft_vocabulary, HIDDEN),
        "norm.weight": zeros("BF16", HIDDEN),
    }


def vocabulary_map(tokens: list[int]) -> Tensors:
    """Tensors that map a draft's vocabulary to these tokens of the target."""
    offsets = struct.pack(f"<{len(tokens)}q", *(token - index for index, token in enumerate(tokens)))
    used = bytes(token in tokens for token in range(VOCABULARY))
    return {"d2t": ("I64", [len(tokens)], offsets), "t2d": ("BOOL", [VOCABULARY], used)}


def safetensors(tensors: Tensors, header: Body | None = None) -> bytes:
    """A safetensors file; ``header`` replaces the entries of tensors."""
    place, entries, content = 0, {}, b""
    for name, (dtype, shape, values) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [place, place + len(values)]}
        place, content = place + len(values), content + values
    text = json.dumps(entries | (header or {})).encode()
    return struct.pack("<Q", len(text)) + text + content


def write_checkpoint(folder: Path, config: Any = None, weights: bytes | None = None) -> Path:
    """Write a checkpoint with the other files of speculators; return its folder."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(head_config() if config is None else config))
    (folder / "model.safetensors").write_bytes(safetensors(head_tensors()) if weights is None else weights)
    (folder / "model.safetensors").chmod(0o600)
    (folder / "val_metrics.json").write_text(json.dumps(METRICS))
    for name in ("optimizer_state_dict.pt", "config.py", "training_state.json"):
        (folder / name).write_text("pickled or code")
    return folder
