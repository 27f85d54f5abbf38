"""The Llama models that many cases are made of, and the limits of the article's case."""

from dataclasses import replace
from typing import Any, Final

from specdecode_operator.sizing.pair import EngineLimits

ARTICLE_LIMITS: Final = EngineLimits(
    max_model_len=8192,
    max_num_seqs=256,
    max_num_batched_tokens=8192,
    block_size=16,
    kv_cache_element_bytes=None,
    memory_utilization_percent=92,
    enforce_eager=False,
    min_concurrency=1,
)
"""Length 8192, 256 sequences, 92 %: what docs/design/sizing.md names, at a start that compiles nothing."""

ARTICLE_FIRST_START: Final = replace(ARTICLE_LIMITS, compiles_anew=True)
"""The limits of its table: those of a start without a compile cache, which plans are for."""

LLAMA_8B_CONFIG: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
"""The config.json of Llama-3.1-8B, as far as its size goes."""

SMALL_CONFIG: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
"""One of eight layers, which no catalogue knows."""
