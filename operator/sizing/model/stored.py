"""Bytes of a model's tensors, as the headers of its safetensors files give them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_TABLES: Final = frozenset(
    (
        *("embed_tokens", "embed_in", "embeddings", "embedding", "word_embeddings", "tok_embeddings", "wte"),
        *("lm_head", "embed_out", "output_layer", "output", "head"),
    )
)
"""Last words of the parts that hold an embedding or an output head."""

_ENCODER: Final = re.compile(
    r"(^|[._])(vision|visual|vit|image|img|audio|speech|sound|video|whisper|siglip|clip|patch)|"
    r"(projector|connector|resampler|aligner|abstractor|mm_embedder|merger|mlp1)",
    re.IGNORECASE,
)
"""Parts that encode other inputs than text, and what joins them to the language model."""

_UNUSED: Final = re.compile(r"(^|\.)(mtp|talker|code2wav|token2wav|tts)(\.|_|$)", re.IGNORECASE)
"""Parts that the engine does not load for text: modules for multi-token prediction, speech that comes out."""


_PREDICTION: Final = re.compile(r"(^|\.)mtp(\.|$)")
"""Parts that hold modules for multi-token prediction."""


@dataclass(frozen=True)
class StoredWeights:
    """Bytes of all tensors in the files, and the same by the type's name in safetensors and by part."""

    total_bytes: int
    output_head: bool  # Whether the files hold an output head of their own
    bytes_by_dtype: tuple[tuple[str, int], ...]
    bytes_by_part: tuple[tuple[str, int], ...] = ()  # The largest parts; empty if they are not known

    @classmethod
    def of(
        cls, total_bytes: int, by_dtype: Mapping[str, int], by_part: Mapping[str, int], *, output_head: bool
    ) -> "StoredWeights":
        """Return the same from mappings."""
        return cls(total_bytes, output_head, tuple(sorted(by_dtype.items())), tuple(sorted(by_part.items())))

    @property
    def encoder_bytes(self) -> int:
        """Bytes of what encodes images, sound or video."""
        return sum(size for part, size in self.bytes_by_part if _encodes(part))

    @property
    def unused_bytes(self) -> int:
        """Bytes of what the engine does not load to answer with text."""
        return sum(size for part, size in self.bytes_by_part if _UNUSED.search(part))

    @property
    def prediction_bytes(self) -> int:
        """Bytes of modules for multi-token prediction."""
        return sum(size for part, size in self.bytes_by_part if _PREDICTION.search(part))

    @property
    def table_bytes(self) -> int | None:
        """Bytes of embedding and output head; None if parts are not known."""
        parts = [(part, size) for part, size in self.bytes_by_part if not (_encodes(part) or _UNUSED.search(part))]
        sizes = [size for part, size in parts if part.rpartition(".")[2] in _TABLES]
        return sum(sizes) if sizes else None

    def loaded_bytes(self, *, quantized: bool) -> int:
        """Return the bytes of all tensors as the engine loads them: float32 as 16 bits unless they are scales.

        vLLM, config/model.py, _resolve_auto_dtype.
        """
        return self.total_bytes - (0 if quantized else dict(self.bytes_by_dtype).get("F32", 0) // 2)


def _encodes(part: str) -> bool:
    return bool(_ENCODER.search(part)) and not _UNUSED.search(part)
