"""Make a tiny Llama model that speaks two artificial languages, and an untrained EAGLE-3 head for it.

Nothing is downloaded and nothing is trained. Each language has its own half of the words. The model
continues a text with the successor of its last word, and the successors of all words of a language
form one long cycle. So a head that was trained on one language knows nothing of the other, answers do
not repeat themselves, and a lookup in the prompt finds nothing.

Needs torch, safetensors and tokenizers, which every vLLM environment has, and tiny_pair.py next to it::

    python tiny_language.py --out /models      # writes /models/target, /models/head and /models/prompts
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import tiny_pair as tiny
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

LAYERS = 12
LAYER_SCALE = 0.01
"""Factor of what the layers add to the residual stream: too little to change the next word."""

FIRST_WORD = 4  # <s>, </s> and two spare tokens come first
LANGUAGES = {"yesterday": range(FIRST_WORD, 514), "today": range(514, tiny.VOCAB)}
PROMPT_WORDS = 16
MARKER = "tiny-language.json"
RECIPE = 1
"""Number of this recipe. Raise it when the files it writes change."""


def make_language(out: Path, prompts: int, seed: int) -> bool:
    """Write the model, its head and the prompts; False if they are there already."""
    marker = out / MARKER
    wanted = json.dumps({"prompts": prompts, "seed": seed, "recipe": RECIPE}) + "\n"
    if marker.is_file() and marker.read_text() == wanted:
        return False
    out.mkdir(parents=True, exist_ok=True)
    marker.unlink(missing_ok=True)
    generator = torch.Generator().manual_seed(seed)
    target = target_weights(generator, successors(generator))
    tiny.write_model(out / "target", target, LAYERS, tokenizer())
    write_head(out / "head", target, generator)
    (out / "prompts").mkdir(exist_ok=True)
    for language, words in LANGUAGES.items():
        write_prompts(out / "prompts" / f"{language}.jsonl", words, prompts, generator)
    marker.write_text(wanted)
    return True


def successors(generator: torch.Generator) -> dict[int, int]:
    """Return the successor of each word: one cycle for each language."""
    found: dict[int, int] = {}
    for words in LANGUAGES.values():
        cycle = [words[index] for index in torch.randperm(len(words), generator=generator).tolist()]
        found |= dict(zip(cycle, [*cycle[1:], cycle[0]], strict=True))
    return found


def target_weights(generator: torch.Generator, successor: dict[int, int]) -> tiny.Weights:
    """Return a model whose output head maps the embedding of a word to its successor."""
    embedding = tiny.random_matrix(generator, tiny.VOCAB, tiny.HIDDEN)
    output = torch.zeros_like(embedding)
    for word, following in successor.items():
        output[following] = embedding[word]
    weights = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(tiny.HIDDEN, dtype=torch.bfloat16),
        "lm_head.weight": output,
    }
    for index in range(LAYERS):
        weights |= tiny.layer_weights(generator, index, LAYER_SCALE)
    return weights


def write_head(folder: Path, target: tiny.Weights, generator: torch.Generator) -> None:
    """Write an EAGLE-3 head with random weights, which proposes almost no word that the target accepts."""
    layer = {
        name.replace("model.layers.0", "midlayer"): each for name, each in tiny.layer_weights(generator, 0, 1.0).items()
    }
    for projection, rows in (("q", tiny.HEADS), ("k", tiny.KV_HEADS), ("v", tiny.KV_HEADS)):
        # The layer of a head reads the embedding of the last word and a hidden state, side by side.
        matrix = tiny.random_matrix(generator, rows * tiny.HEAD_DIM, 2 * tiny.HIDDEN)
        layer[f"midlayer.self_attn.{projection}_proj.weight"] = matrix
    weights = {
        **layer,
        "embed_tokens.weight": target["model.embed_tokens.weight"].clone(),
        "midlayer.hidden_norm.weight": torch.ones(tiny.HIDDEN, dtype=torch.bfloat16),
        "norm.weight": torch.ones(tiny.HIDDEN, dtype=torch.bfloat16),
        "fc.weight": tiny.random_matrix(generator, tiny.HIDDEN, 3 * tiny.HIDDEN),
        "lm_head.weight": target["lm_head.weight"].clone(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny.model_config(1) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": tiny.VOCAB,
        "eagle_aux_hidden_state_layer_ids": [2, LAYERS // 2, LAYERS - 3],
    }
    tiny.write_json(folder / "config.json", config)
    checkpoint = folder / "model.safetensors"
    tiny.save_file(weights, checkpoint, metadata={"format": "pt"})
    checkpoint.chmod(0o644)


def tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per word: w4 to w1023."""
    names = {tiny.BOS: 0, tiny.EOS: 1} | {f"w{number}": number for number in range(2, tiny.VOCAB)}
    made = Tokenizer(models.WordLevel(names, unk_token=tiny.EOS))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


def write_prompts(file: Path, words: range, count: int, generator: torch.Generator) -> None:
    """Write random texts of one language, one JSON object per line."""
    drawn = torch.randint(words.start, words.stop, (count, PROMPT_WORDS), generator=generator).tolist()
    lines = (json.dumps({"prompt": " ".join(f"w{word}" for word in text)}) for text in drawn)
    file.write_text("".join(f"{line}\n" for line in lines))


def main() -> None:
    """Make the files that the command line asks for."""
    parser = argparse.ArgumentParser(description="Make a tiny model of two languages, with an untrained head.")
    parser.add_argument("--out", type=Path, required=True, help="folder for target/, head/ and prompts/")
    parser.add_argument("--prompts", type=int, default=600, help="prompts per language (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    made = make_language(arguments.out, arguments.prompts, arguments.seed)
    print(f"{arguments.out}: {'made' if made else 'already there'}")


if __name__ == "__main__":
    main()
