"""A tokenizer made on the spot, for models of which there is only a config.json.

Bytes, and pairs of small letters and of a space with one: English text takes about half as many tokens as bytes, twice
as many as with a model's own tokenizer.
"""

from itertools import product
from string import ascii_lowercase
from typing import Any, Final

BEGIN: Final = 0
END: Final = 1
"""Tokens that begin and end a text."""

_SPECIAL: Final = ("<s>", "</s>")

TOKENIZER_CONFIG: Final[dict[str, Any]] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": _SPECIAL[BEGIN],
    "eos_token": _SPECIAL[END],
    "chat_template": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}",
}

_SPACE: Final = "\u0120"
"""How byte-level tokenizers write a space."""


def tokenizer_json(vocabulary: int) -> dict[str, Any]:
    """Return the content of a tokenizer.json with at most so many tokens."""
    letters = [*_SPECIAL, *_byte_letters()]
    merges = [*product(ascii_lowercase, repeat=2), *product(_SPACE, ascii_lowercase)][
        : max(0, vocabulary - len(letters))
    ]
    tokens = [*letters, *("".join(pair) for pair in merges)]
    return {
        "version": "1.0",
        "added_tokens": [_added(number, token) for number, token in enumerate(_SPECIAL)],
        "normalizer": None,
        "pre_tokenizer": _BYTE_LEVEL | {"add_prefix_space": False},
        "post_processor": None,
        "decoder": _BYTE_LEVEL | {"add_prefix_space": True},
        "model": {
            "type": "BPE",
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [list(pair) for pair in merges],
        },
    }


def text_tokens(tokenizer: dict[str, Any]) -> tuple[int, int]:
    """Return the first and the last of its tokens that are pairs of letters; of small letters where it has no pairs."""
    model = tokenizer["model"]
    if model["merges"]:
        return len(model["vocab"]) - len(model["merges"]), len(model["vocab"]) - 1
    return model["vocab"]["a"], model["vocab"]["z"]


_BYTE_LEVEL: Final[dict[str, Any]] = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}


def _added(number: int, token: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": token, "special": True, **flags}


def _byte_letters() -> list[str]:
    """Return the letter that stands for each byte: itself where it can be seen, else one from U+0100 on."""
    seen = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in seen else next(others)) for byte in range(256)]
