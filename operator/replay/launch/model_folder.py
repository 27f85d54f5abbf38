"""Folders of models without weights: what `vllm serve` insists on, and no more."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from specdecode_operator.replay.launch.tokenizer import BEGIN, END, TOKENIZER_CONFIG, text_tokens, tokenizer_json

_OF_A_TOKENIZER: Final = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "tekken.json",
    "chat_template*",
    "generation_config.json",
)
"""Files of a model's repository that are its tokenizer's, and say where its texts end."""

_WORDS: Final = ("tokenizer.", "vocab", "tekken.json")
"""How the files begin that hold its tokens."""

_NOT_TOLD: Final = ("quantization_config", "compression_config", "auto_map")
"""What says how weights are stored, and asks for kernels and code that are not needed."""

_USUAL_TEXT: Final = (300, 1000)
"""Tokens of a text: in the vocabularies of published models these are pieces of words, and none of them ends it."""


def write_model_folder(
    folder: Path, config: Mapping[str, Any], tokenizer: Path | None, *, is_draft: bool = False
) -> tuple[int, int]:
    """Write the folder of a model; return the first and last token of the text that it shall generate.

    ``tokenizer`` is a folder with the tokenizer's files; None: one is made on the spot. A draft keeps its architecture.
    """
    folder.mkdir(parents=True)
    told = {
        name: value for name, value in (config if is_draft else text_config(config)).items() if name not in _NOT_TOLD
    }
    vocabulary = int(told.get("vocab_size") or _USUAL_TEXT[1] + 1)
    if tokenizer is not None:
        for path in tokenizer_files(tokenizer):
            shutil.copy(path, folder / path.name)
        text = min(_USUAL_TEXT[0], vocabulary - 1), min(_USUAL_TEXT[1], vocabulary - 1)
    else:
        made = tokenizer_json(vocabulary)
        ends = {"bos_token_id": BEGIN, "eos_token_id": END}
        told |= ends | ({"pad_token_id": END} if "pad_token_id" in told else {})
        _write(folder / "tokenizer.json", made)
        _write(folder / "tokenizer_config.json", TOKENIZER_CONFIG)
        _write(folder / "generation_config.json", ends)
        text = text_tokens(made)
    _write(folder / "config.json", told)
    return text


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of a tokenizer in a folder; none where there is no tokenizer."""
    found = [path for pattern in _OF_A_TOKENIZER for path in sorted(folder.glob(pattern)) if path.is_file()]
    return found if any(path.name.startswith(_WORDS) for path in found) else []


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a config.json that generates text: what sees and hears needs processors that are not there."""
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return dict(config)
    outer_names = [
        str(each).replace("ForConditionalGeneration", "ForCausalLM") for each in config.get("architectures", ())
    ]
    names = inner.get("architectures") or outer_names
    outer = {name: config[name] for name in ("dtype", "torch_dtype", "tie_word_embeddings") if name in config}
    return {**outer, **inner, "architectures": names}


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
