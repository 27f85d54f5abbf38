"""Settings of the emulated engine: one JSON file that vLLM's --additional-config names."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .engine_model import Acceptance, StepTime, acceptance_from_json, step_time_from_json

KEY: Final = "specdecode_emulated"
"""Of --additional-config: the path of the file."""


@dataclass(frozen=True)
class CachedLayers:
    """Equal layers, and what each of them keeps on one rank."""

    count: int
    kind: str  # full, latent, sliding, chunked or state
    of_draft: bool = False
    block_size: int = 0  # tokens in its blocks; 0 for a state
    page_bytes: int = 0  # of a block in this layer
    # Of attention
    token_bytes: int = 0
    head_width: int = 0
    element_bytes: int = 0
    reach_tokens: int = 0  # of a window or a chunk
    # Of a state: bytes with room for the speculated tokens
    state_bytes: int = 0
    exports_checkpoint: bool = False


@dataclass(frozen=True)
class Settings:
    """Everything that decides what the executor does."""

    step_time: StepTime
    layers: Sequence[CachedLayers]
    kv_cache_bytes: int  # of each rank
    acceptance: Acceptance | None = None  # None without speculation
    text: tuple[int, int] = (300, 1000)  # first and last token id of what is generated; no token between them ends it
    seed: int = 0
    gpu: str | None = None  # what is emulated: captures name it so
    folder: Path | None = None  # for what is told of the steps
    tells_steps: bool = False  # each of them, beside the verdict on all


def read_settings(additional_config: Any) -> Settings:
    """Return the settings that vLLM's additional_config names."""
    if not isinstance(additional_config, Mapping) or KEY not in additional_config:
        message = f'emulated: --additional-config \'{{"{KEY}": "FILE"}}\' is needed: use specdecode replay serve'
        raise ValueError(message)
    return settings_from_json(json.loads(Path(additional_config[KEY]).read_text(encoding="utf-8")))


def settings_from_json(given: Mapping[str, Any]) -> Settings:
    """Return settings as the file has them."""
    folder = given.get("folder")
    acceptance = given.get("acceptance")
    first, last = given.get("text", (300, 1000))
    return Settings(
        step_time=step_time_from_json(given["step_time"]),
        layers=tuple(CachedLayers(**each) for each in given["layers"]),
        kv_cache_bytes=given["kv_cache_bytes"],
        acceptance=None if acceptance is None else acceptance_from_json(acceptance),
        text=(first, last),
        seed=given.get("seed", 0),
        gpu=given.get("gpu"),
        folder=None if folder is None else Path(folder),
        tells_steps=given.get("tells_steps", False),
    )
