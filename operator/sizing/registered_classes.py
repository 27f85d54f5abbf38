"""Model classes in vLLM's registry, each with its first and last version (data/registry.json).

If the registry lacks a class, vLLM falls back to the Transformers class of that name. Without one, vLLM exits
with an error. Source: vLLM, model_executor/models/registry.py, inspect_model_cls.
"""

from dataclasses import dataclass
from functools import cache
from typing import Final

from specdecode_operator.sizing.data_files import read_data
from specdecode_operator.vllm.versions import LAUNCHED_VERSIONS, release

GENERATES: Final = ("ForCausalLM", "ForConditionalGeneration", "ChatModel", "LMHeadModel")
"""Endings that replace each other: vLLM looks for the class with each of them (config/model.py,
_SUFFIX_TO_DEFAULTS; registry.py, _normalize_arch). A class that no registry has is a decoder if it ends so."""


@dataclass(frozen=True)
class Unregistered:
    """A class that the registry of a vLLM version does not have."""

    architecture: str
    why: str  # The end of a sentence that begins with the class
    fix: str
    refused: bool  # Whether vLLM ends with an error, instead of running the model through transformers


@cache
def _spans() -> dict[str, tuple[str | None, str | None]]:
    """Return the first and last version of each class; None if no end is known."""
    data = read_data("registry.json")
    since = {name: version for version, names in data["since"].items() for name in names}
    until = {name: version for version, names in data["until"].items() for name in names}
    return {name: (since.get(name), until.get(name)) for name in {*data["classes"], *since, *until}}


def is_registered(architecture: str) -> bool:
    """Return whether the registry of any known version has a class."""
    return architecture in _spans()


def may_be_served(architecture: str) -> bool:
    """Return whether any known version has a class, or transformers may."""
    return is_registered(architecture) or architecture.endswith(GENERATES)


def unregistered(architecture: str, version: str) -> Unregistered | None:
    """Return why a vLLM version such as ``0.32`` does not have a class; None if it does.

    Also return None for a decoder that no registry has, which runs through transformers. Versions newer than the known
    ones have the classes of the newest.
    """
    ending = next((each for each in GENERATES if architecture.endswith(each)), None)
    stem = architecture.removesuffix(ending or "")
    for name in (architecture, *(f"{stem}{each}" for each in (GENERATES if ending else ()))):
        since, until = _spans().get(name, (None, None))
        if name in _spans() and release(since or version) <= release(version) <= release(until or version):
            return None
    registry = read_data("registry.json")
    since, until = _spans().get(architecture, (None, None))
    fix = "use another model"
    if since is not None and release(version) < release(since):
        why = f"needs vLLM {since} (registered since), and vLLM is {version} here"
        fix = f"use vLLM {since} or newer, or another model"
    elif until is not None:
        why = f"was registered by vLLM up to {until}, and vLLM is {version} here"
        if release(until) >= release(LAUNCHED_VERSIONS[0]):
            fix = f"use vLLM {until}, or another model"
    elif architecture.endswith(GENERATES):
        return None
    elif release(version) > release(registry["newest"]):
        why = f"is unknown to vLLM {registry['newest']}, the newest that this operator supports; {version} may have it"
        return Unregistered(architecture, why, fix, refused=False)
    else:
        why = "is unknown to vLLM, which would not start"
    return Unregistered(architecture, why, fix, refused=architecture not in registry["in_transformers"])
