"""Models whose geometry ships with the operator."""

from functools import cache
from typing import Any

from specdecode_operator.sizing.datafiles import read_data
from specdecode_operator.sizing.geometry import ModelGeometry, geometry_from_config


def find_geometry(model_id: str) -> ModelGeometry | None:
    """Return the geometry of the model with exactly this hub id, or None."""
    entry = _entries().get(model_id)
    return None if entry is None else geometry_from_config(model_id, entry["config"])


def known_models() -> tuple[str, ...]:
    """Return the hub ids that need no config of their own, sorted."""
    return tuple(sorted(_entries()))


@cache
def _entries() -> dict[str, dict[str, Any]]:
    return {entry["id"]: entry for entry in read_data("models.json")["models"]}
