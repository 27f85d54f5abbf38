"""Facts files as `specdecode models add` writes them."""

import json
import struct
from pathlib import Path
from typing import Any

from specdecode_operator.deployment.models.checkpoint_reader import Checkpoint, Weights
from specdecode_operator.deployment.models.facts_files import facts_data
from tests.support.objects import TINY_CONFIG

TINY_BYTES = 5_771_776
"""Of the weights of the tiny target in the tests, in BF16."""


def facts_text(model: str, config: dict[str, Any] | None = None, weights_bytes: int = TINY_BYTES) -> str:
    """Return the facts file of a tiny model."""
    weights = Weights(weights_bytes, 39, True, {"BF16": weights_bytes}, {})
    return json.dumps(facts_data(model, Checkpoint(config or TINY_CONFIG, weights), "a folder"))


def write_facts(folder: Path, name: str, model: str, config: dict[str, Any] | None = None) -> Path:
    """Write the facts file of a tiny model; a file that was there changes as a whole, as in a mounted ConfigMap."""
    folder.mkdir(exist_ok=True)
    fresh = folder / f".{name}"
    fresh.write_text(facts_text(model, config))
    return fresh.replace(folder / name)


def write_model_folder(folder: Path) -> None:
    """Write a tiny model of which there are config.json and the headers of its weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(TINY_CONFIG))
    tensor = {"dtype": "BF16", "shape": [TINY_BYTES // 2], "data_offsets": [0, TINY_BYTES]}
    header = json.dumps({"lm_head.weight": tensor}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
