"""Make tiny targets and the heads that draft for them; runs in the engine's Python.

    python tiny_heads.py FOLDER

Every target is a walk through its vocabulary: the next token follows almost from the last one alone, as its
decoder layers add little. So heads can be written down that foresee it, without training: what they propose is
often accepted, and rejected where the layers had their say.
"""

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[2] / "examples"))

import tiny_pair as tiny

NOISE = 0.01
"""What the target's layers add: about four steps in ten are not the one foreseen."""

HEADS = 3
"""Of Medusa: one for each token that is drafted."""

LOOP_TOKENS = range(100, 108)
"""What the looping target writes: after the first eight tokens every n-gram of its output has occurred before."""

_LOOP_SCALE = 8.0
"""Makes a wrong token less likely than e^-60 at temperature 1, whatever the CPU rounds."""

STRANGER_LAYERS = 2 * tiny.TARGET_LAYERS

Weights = dict[str, torch.Tensor]
Config = dict[str, object]


def main(folder: Path) -> None:
    """Write every target and head below a folder, each under the name of its method or family."""
    generator = torch.Generator().manual_seed(0)
    walk = walk_weights(generator)
    tokenizer = tiny.train_tokenizer()
    llama = tiny.model_config(tiny.TARGET_LAYERS)
    tiny.write_model(folder / "target", walk, tiny.TARGET_LAYERS, tokenizer)
    for name, head, config in (
        ("eagle", eagle_weights(generator, walk), llama | {"num_hidden_layers": 1}),
        ("eagle3", eagle3_weights(generator, walk), llama | {"num_hidden_layers": 1} | AUXILIARY_LAYERS),
        ("p-eagle", peagle_weights(generator, walk), llama | {"num_hidden_layers": 1} | AUXILIARY_LAYERS | PLACES),
        ("medusa", medusa_weights(walk), medusa_config()),
        ("dflash", dflash_weights(generator), dflash_config(walk)),
    ):
        write_model(folder / name, head, config)
    tiny.write_model(folder / "draft", draft_weights(generator, walk), tiny.DRAFT_LAYERS, tokenizer)
    tiny.write_model(folder / "loop" / "target", loop_weights(), 1, tokenizer)
    tiny.write_model(folder / "stranger", stranger_weights(), STRANGER_LAYERS, tokenizer)
    tiny.write_model(folder / "pard", draft_weights(generator, walk), tiny.DRAFT_LAYERS, tokenizer)
    tiny.write_json(folder / "pard" / "config.json", tiny.model_config(tiny.DRAFT_LAYERS) | {"pard_token": 7})
    tiny.write_model(folder / "mimo", walk | mimo_extras(generator), tiny.TARGET_LAYERS, tokenizer)
    tiny.write_json(folder / "mimo" / "config.json", mimo_config())


def write_model(folder: Path, weights: Weights, config: Config) -> None:
    """Write a head: it has no tokenizer of its own."""
    folder.mkdir(parents=True)
    tiny.write_json(folder / "config.json", config)
    tiny.save_file({name: each.contiguous() for name, each in weights.items()}, folder / "model.safetensors")


def walk_weights(generator: torch.Generator) -> Weights:
    """Weights of the target."""
    weights = {
        "model.embed_tokens.weight": tiny.random_matrix(generator, tiny.VOCAB, tiny.HIDDEN),
        "model.norm.weight": ones(),
        "lm_head.weight": tiny.random_matrix(generator, tiny.VOCAB, tiny.HIDDEN),
    }
    for index in range(tiny.TARGET_LAYERS):
        weights |= tiny.layer_weights(generator, index, NOISE)
    return weights


def reached(walk: Weights, steps: int) -> torch.Tensor:
    """Return the token that each token leads to in so many steps, by the last token alone."""
    following = (walk["model.embed_tokens.weight"].float() @ walk["lm_head.weight"].float().T).argmax(dim=1)
    tokens = torch.arange(tiny.VOCAB)
    for _ in range(steps):
        tokens = following[tokens]
    return tokens


def foresight(walk: Weights, steps: int) -> torch.Tensor:
    """Return an output head that reads the last token's hidden state and names the token so many steps on."""
    embedding = walk["model.embed_tokens.weight"].float()
    head = torch.zeros(tiny.VOCAB, tiny.HIDDEN)
    # Random vectors are almost at right angles: each answers to its own token only.
    head.index_add_(0, reached(walk, steps), torch.nn.functional.normalize(embedding, dim=1))
    return head.to(torch.bfloat16)


def passing_layer(generator: torch.Generator, prefix: str) -> Weights:
    """Weights of a decoder layer that passes on what it gets."""
    layer = tiny.layer_weights(generator, 0, 0.0)
    return {name.replace("model.layers.0", prefix): each for name, each in layer.items()}


def draft_weights(generator: torch.Generator, walk: Weights) -> Weights:
    """Return a whole model that walks on from the last token."""
    tables = {name: each.clone() for name, each in walk.items() if ".layers." not in name}
    return tables | passing_layer(generator, "model.layers.0")


def loop_weights() -> Weights:
    """Return a target that writes the same eight tokens in turn, at every temperature: lookups always succeed."""
    generator = torch.Generator().manual_seed(2)
    directions = torch.linalg.qr(torch.randn(tiny.HIDDEN, len(LOOP_TOKENS), generator=generator)).Q.T
    place = torch.arange(tiny.VOCAB) % len(LOOP_TOKENS)
    head = torch.zeros(tiny.VOCAB, tiny.HIDDEN)
    for token in LOOP_TOKENS:
        head[token] = _LOOP_SCALE * directions[(token - 1) % len(LOOP_TOKENS)]
    tables = {
        "model.embed_tokens.weight": directions[place].to(torch.bfloat16),
        "model.norm.weight": ones(),
        "lm_head.weight": head.to(torch.bfloat16),
    }
    return tables | passing_layer(generator, "model.layers.0")


def stranger_weights() -> Weights:
    """Return a draft that never agrees: it costs more than the target and has nothing in common with it."""
    generator = torch.Generator().manual_seed(1)
    weights = {
        "model.embed_tokens.weight": tiny.random_matrix(generator, tiny.VOCAB, tiny.HIDDEN),
        "model.norm.weight": ones(),
        "lm_head.weight": tiny.random_matrix(generator, tiny.VOCAB, tiny.HIDDEN),
    }
    for index in range(STRANGER_LAYERS):
        weights |= tiny.layer_weights(generator, index, 1.0)
    return weights


def eagle_weights(generator: torch.Generator, walk: Weights) -> Weights:
    """A head that walks on from the token that it gets, and lets the target's hidden state be (llama_eagle.py)."""
    layer = passing_layer(generator, "layers.0")
    del layer["layers.0.input_layernorm.weight"]
    return layer | {
        "embed_tokens.weight": walk["model.embed_tokens.weight"],
        "fc.weight": torch.cat([identity(), nothing()], dim=1),
    }


AUXILIARY_LAYERS: Config = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}


def eagle3_weights(generator: torch.Generator, walk: Weights) -> Weights:
    """A head that sees two tokens on from the target's first hidden state, and no further (llama_eagle3.py)."""
    layer = passing_layer(generator, "midlayer")
    for name in ("q_proj", "k_proj", "v_proj"):
        half = layer[f"midlayer.self_attn.{name}.weight"]
        layer[f"midlayer.self_attn.{name}.weight"] = torch.cat([half, half], dim=1)
    return layer | {
        "midlayer.hidden_norm.weight": ones(),
        "norm.weight": ones(),
        "embed_tokens.weight": walk["model.embed_tokens.weight"],
        "fc.weight": torch.cat([identity(), nothing(), nothing()], dim=1),
        "lm_head.weight": foresight(walk, 2),
    }


PLACES: Config = {"ptd_token_id": 7}


def peagle_weights(generator: torch.Generator, walk: Weights) -> Weights:
    """The same head, with a hidden state for places to fill: what it proposes there is the same for all."""
    return eagle3_weights(generator, walk) | {"mask_hidden": torch.zeros(1, 3 * tiny.HIDDEN, dtype=torch.bfloat16)}


def medusa_weights(walk: Weights) -> Weights:
    """A head for each token to come: the first is sampled by the target itself (medusa.py)."""
    heads: Weights = {}
    for index in range(HEADS):
        heads[f"blocks.{index}.layers.0.weight"] = nothing()
        heads[f"lm_heads.{index}.weight"] = foresight(walk, index + 2)
    return heads


def medusa_config() -> Config:
    """``config.json`` of the Medusa heads."""
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": tiny.HIDDEN,
        "vocab_size": tiny.VOCAB,
        "num_heads": HEADS,
        "num_hidden_layers": 1,
    }


def mimo_extras(generator: torch.Generator) -> Weights:
    """What a MiMo model has beyond a Llama: biases, and a layer that walks on from the token that it gets."""
    prefix = "model.mtp_layers.0"
    layers = [f"model.layers.{index}" for index in range(tiny.TARGET_LAYERS)]
    extras = {
        f"{layer}.self_attn.{name}.bias": torch.zeros(rows, dtype=torch.bfloat16)
        for layer in (*layers, prefix)
        for name, rows in BIASES.items()
    }
    extras |= {
        f"{prefix}.self_attn.{name}.bias": torch.zeros(rows, dtype=torch.bfloat16) for name, rows in BIASES.items()
    }
    extras |= {f"{prefix}.{name}.weight": ones() for name in ("token_layernorm", "hidden_layernorm", "final_layernorm")}
    extras[f"{prefix}.input_proj.weight"] = torch.cat([nothing(), identity()], dim=1)
    return extras | passing_layer(generator, prefix)


BIASES = {
    "q_proj": tiny.HEADS * tiny.HEAD_DIM,
    "k_proj": tiny.KV_HEADS * tiny.HEAD_DIM,
    "v_proj": tiny.KV_HEADS * tiny.HEAD_DIM,
}


def mimo_config() -> Config:
    """``config.json`` of the MiMo target."""
    family = {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1}
    return tiny.model_config(tiny.TARGET_LAYERS) | family


def dflash_weights(generator: torch.Generator) -> Weights:
    """A head that proposes what follows its mask token, whatever came before (qwen3_dflash.py)."""
    norms = ("layers.0.self_attn.q_norm.weight", "layers.0.self_attn.k_norm.weight")
    return passing_layer(generator, "layers.0") | {
        **{name: torch.ones(tiny.HEAD_DIM, dtype=torch.bfloat16) for name in norms},
        "fc.weight": tiny.random_matrix(generator, tiny.HIDDEN, 2 * tiny.HIDDEN),
        "hidden_norm.weight": ones(),
        "norm.weight": ones(),
    }


def dflash_config(walk: Weights) -> Config:
    """``config.json`` of the DFlash head. Its mask is a token that the walk comes back to again and again."""
    mask = int(reached(walk, tiny.VOCAB)[0])
    family = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 1,
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": [1, 2]},
    }
    return tiny.model_config(1) | family


def ones() -> torch.Tensor:
    """Weights of a norm."""
    return torch.ones(tiny.HIDDEN, dtype=torch.bfloat16)


def identity() -> torch.Tensor:
    """Weights that pass a hidden state on."""
    return torch.eye(tiny.HIDDEN, dtype=torch.bfloat16)


def nothing() -> torch.Tensor:
    """Weights that pass nothing on."""
    return torch.zeros(tiny.HIDDEN, tiny.HIDDEN, dtype=torch.bfloat16)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
