"""Make two tiny Llama models, a target and its draft, for trying speculative decoding.

Nothing is downloaded and nothing is trained. The draft is one random decoder
layer. The target shares the draft's embedding, layer, norm and output head, and
has further random layers, as many as ``--target-layers`` asks for. What those layers
add to the residual stream is scaled by ``--agreement-noise``, so the two models agree
on the next token more or less often: that agreement is the acceptance rate of greedy
speculative decoding.

========  ==========================
noise     greedy agreement, 4 layers
========  ==========================
0         1.00
0.05      0.84
0.1       0.70
0.2       0.46
0.3       0.30
0.5       0.13
1         0.04
========  ==========================

With 40 layers and a noise of 0.01, the target accepts 90 % of the tokens that the draft
proposes four at a time, and one step of the target takes ten times as long as one of the
draft (vLLM on one CPU core), so speculation gives several times the tokens per second
even without a GPU.

Needs torch, safetensors and tokenizers, which every vLLM environment has::

    python tiny_pair.py --out /models      # writes /models/target and /models/draft
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HIDDEN = 256
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 64
INTERMEDIATE = 512
VOCAB = 1024
MAX_POSITIONS = 2048
DRAFT_LAYERS = 1
TARGET_LAYERS = 4

WEIGHT_STD = 0.06
"""Three times the usual 0.02: the best token then leads by more than bf16 rounds off."""

BOS, EOS = "<s>", "</s>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message['role'] }}: {{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
MARKER = "tiny-pair.json"
RECIPE = 1
"""Number of this recipe. Raise it when the files it writes change."""

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class PairParameters:
    """Everything that decides the bytes of a pair."""

    seed: int = 0
    agreement_noise: float = 0.1
    recipe: int = RECIPE
    target_layers: int = TARGET_LAYERS


def make_pair(out: Path, parameters: PairParameters) -> bool:
    """Write ``out/target`` and ``out/draft``; False when that very pair is there already.

    The marker file is removed first and written last, so a pair that was cut off
    half-way is made again.
    """
    marker = out / MARKER
    wanted = json.dumps(asdict(parameters), indent=2) + "\n"
    if marker.is_file() and marker.read_text() == wanted:
        return False
    out.mkdir(parents=True, exist_ok=True)
    marker.unlink(missing_ok=True)
    draft, target = pair_weights(parameters)
    tokenizer = train_tokenizer()
    write_model(out / "draft", draft, DRAFT_LAYERS, tokenizer)
    write_model(out / "target", target, parameters.target_layers, tokenizer)
    marker.write_text(wanted)
    return True


def pair_weights(parameters: PairParameters) -> tuple[Weights, Weights]:
    """Weights of the draft and of the target, in bf16."""
    generator = torch.Generator().manual_seed(parameters.seed)
    draft = {
        "model.embed_tokens.weight": random_matrix(generator, VOCAB, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
        "lm_head.weight": random_matrix(generator, VOCAB, HIDDEN),
        **layer_weights(generator, index=0, output_scale=1.0),
    }
    # A copy for each model: safetensors refuses tensors that share memory.
    target = {name: tensor.clone() for name, tensor in draft.items()}
    added = max(1, parameters.target_layers - DRAFT_LAYERS)
    # Independent contributions add up in quadrature, so that the depth does not change the agreement.
    output_scale = parameters.agreement_noise * math.sqrt((TARGET_LAYERS - DRAFT_LAYERS) / added)
    for index in range(DRAFT_LAYERS, parameters.target_layers):
        target |= layer_weights(generator, index, output_scale)
    return draft, target


def layer_weights(generator: torch.Generator, index: int, output_scale: float) -> Weights:
    """Weights of one random decoder layer.

    ``output_scale`` multiplies the two projections that write to the residual
    stream; 0 makes the layer pass its input through unchanged.
    """
    prefix = f"model.layers.{index}"
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {
        "self_attn.q_proj": (queries, HIDDEN),
        "self_attn.k_proj": (keys, HIDDEN),
        "self_attn.v_proj": (keys, HIDDEN),
        "self_attn.o_proj": (HIDDEN, queries),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    weights = {
        f"{prefix}.{norm}.weight": torch.ones(HIDDEN, dtype=torch.bfloat16)
        for norm in ("input_layernorm", "post_attention_layernorm")
    }
    for name, (rows, columns) in shapes.items():
        matrix = random_matrix(generator, rows, columns)
        writes_residual = name.endswith(("o_proj", "down_proj"))
        weights[f"{prefix}.{name}.weight"] = matrix * output_scale if writes_residual else matrix
    return weights


def random_matrix(generator: torch.Generator, rows: int, columns: int) -> torch.Tensor:
    """A bf16 matrix of normal numbers with standard deviation ``WEIGHT_STD``."""
    numbers = torch.randn(rows, columns, generator=generator) * WEIGHT_STD
    return numbers.to(torch.bfloat16)


def train_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer with exactly ``VOCAB`` tokens."""
    syllables = ["".join(pair) for pair in itertools.product("bcdfghjklmnpqrstvwxyz", "aeiou")]
    words = ["".join(pair) for pair in itertools.product(syllables, repeat=2)]
    lines = [
        "The quick brown fox jumps over the lazy dog.",
        "A draft model proposes tokens and the target model accepts or rejects them.",
        "user: Tell me a story about the sea.\nassistant: Once upon a time",
        " ".join(words),
    ]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    if tokenizer.get_vocab_size() != VOCAB:
        message = f"tokenizer has {tokenizer.get_vocab_size()} tokens, expected {VOCAB}"
        raise RuntimeError(message)
    return tokenizer


def model_config(layers: int) -> dict[str, object]:
    """``config.json`` of a Llama model with that many layers."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def write_model(folder: Path, weights: Weights, layers: int, tokenizer: Tokenizer) -> None:
    """Write one model folder as the Hugging Face libraries lay it out."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", model_config(layers))
    write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1})
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "model_max_length": MAX_POSITIONS,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    checkpoint = folder / "model.safetensors"
    save_file(weights, checkpoint, metadata={"format": "pt"})
    # The engine may run as another user than the one who made the models.
    checkpoint.chmod(0o644)


def write_json(path: Path, value: dict[str, object]) -> None:
    """Write ``value`` as indented JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n")


def main() -> None:
    """Make the pair that the command line asks for."""
    parser = argparse.ArgumentParser(description="Make a tiny target and draft model pair.")
    parser.add_argument("--out", type=Path, required=True, help="folder for target/ and draft/")
    parser.add_argument("--seed", type=int, default=PairParameters.seed)
    parser.add_argument(
        "--agreement-noise",
        type=float,
        default=PairParameters.agreement_noise,
        help="0 makes the models equal, 1 makes them disagree (default: %(default)s)",
    )
    parser.add_argument(
        "--target-layers",
        type=int,
        default=PairParameters.target_layers,
        help="layers of the target; more make its step slower (default: %(default)s)",
    )
    arguments = parser.parse_args()
    parameters = PairParameters(arguments.seed, arguments.agreement_noise, target_layers=arguments.target_layers)
    made = make_pair(arguments.out, parameters)
    print(f"{arguments.out}: {'made' if made else 'already there'}, {parameters}")


if __name__ == "__main__":
    main()
