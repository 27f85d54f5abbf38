"""Read the JSON data files under sizing/data."""

import json
from pathlib import Path
from typing import Any

import msgspec

_FOLDER = Path(__file__).parent / "data"


def read_data(name: str) -> dict[str, Any]:
    """Return the content of one JSON file of ``sizing/data``."""
    text = (_FOLDER / name).read_bytes()
    content: dict[str, Any]
    try:
        content = msgspec.json.decode(text)
    except msgspec.DecodeError:  # Infinity, which is in published configs and in no JSON
        content = json.loads(text)
    return content


def data_files(folder: str) -> tuple[str, ...]:
    """Return the names that ``read_data`` takes for the JSON files of one folder of ``sizing/data``, sorted."""
    return tuple(sorted(f"{folder}/{path.name}" for path in (_FOLDER / folder).glob("*.json")))
