"""Reads parts of objects that people wrote, which may be anything."""

from collections.abc import Mapping
from typing import Any


def objects(body: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Return the objects of a list; none where there is no list."""
    found = body.get(key)
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def mapping(body: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return an object inside another; empty where there is none."""
    found = body.get(key)
    return found if isinstance(found, dict) else {}


def texts(body: Mapping[str, Any], key: str) -> list[str]:
    """Return the entries of a list as text; none where there is no list."""
    found = body.get(key)
    return [str(each) for each in found] if isinstance(found, list) else []


def name_of(body: Mapping[str, Any]) -> str:
    """Return the name of a volume, a mount, a variable or a container."""
    return str(body.get("name"))
