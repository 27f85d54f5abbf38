"""Reads a speculators checkpoint that a server is given as its model: vLLM serves the verifier and drafts with it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from specdecode_operator.kube.untyped import mapping, objects
from specdecode_operator.migration.arguments import Argument
from specdecode_operator.migration.builder import MigrationError, SpecBuilder
from specdecode_operator.migration.speculation import SpeculativeConfig
from specdecode_operator.sizing.families.catalogue import find_entry, published_heads

_SECTION: Final = "speculators_config"
_METHODS: Final = {"peagle": "eagle3", "dflash2": "dflash"}
"""vllm/transformers_utils/configs/speculators/base.py, build_vllm_speculative_config; others keep their name."""

_MARKER: Final = "speculator"
"""Part of the names of such checkpoints: org/model-speculator.eagle3."""


def take_speculators(
    flags: Sequence[Argument],
    found: SpeculativeConfig,
    configs: Mapping[str, Mapping[str, Any]],
    builder: SpecBuilder,
) -> list[Argument]:
    """Return the flags with the verifier as the model if the given model is a speculators checkpoint.

    The head goes to ``found``, with the method and the number of tokens of its config. Without a config, a draft head
    as the model is a decision.

    Source: vllm/transformers_utils/config.py, maybe_override_with_speculators.

    Raises
    ------
    MigrationError
        When ``configs`` has a model that the server is not given.
    """
    model = next((each for each in flags if not each.name), None)
    model = model or next((each for each in reversed(flags) if each.name == "--model" and each.values), None)
    if model is None:
        return list(flags)
    name = model.values[0]
    for other in configs.keys() - {name}:
        raise MigrationError("--model-config", other, f"the server is given {name}: write {name}=PATH")
    entry = find_entry(name)
    config = configs.get(name) or (entry.config if entry else {})
    section = mapping(config, _SECTION)
    verifier = mapping(section, "verifier").get("name_or_path")
    if not isinstance(verifier, str) or not verifier:
        _ask_for_verifier(name, builder)
        return list(flags)
    for key in found.config.keys() & {"method", "model"}:
        builder.drop(found.written[key], f"vLLM goes by {_SECTION} of {name}")
    algorithm = str(config.get("speculators_model_type") or section.get("algorithm"))
    said: dict[str, Any] = {"method": _METHODS.get(algorithm, algorithm), "model": name}
    tokens = next(iter(objects(section, "proposal_methods")), {}).get("speculative_tokens")
    if "num_speculative_tokens" not in found.config and tokens is not None:
        said["num_speculative_tokens"] = tokens
    for key, value in said.items():
        found.config[key], found.written[key] = value, f"{key} in {_SECTION} of {name}"
    if builder.get("serving.servedModelNames") is None:
        builder.take("the name that clients ask for", "serving.servedModelNames", [name])
    return [replace(each, values=(verifier,)) if each is model else each for each in flags]


def _ask_for_verifier(name: str, builder: SpecBuilder) -> None:
    head = next((each for each in published_heads() if each.head == name), None)
    if head is not None:
        message = f"is a draft head: serve {head.targets[0]} with method {head.method} and this as its draft"
        builder.decide("spec.target.model", name, message)
    elif _MARKER in name.lower():
        message = (
            "is a speculators head by its name: vLLM serves the model that its config.json names as verifier; give the"
            f" file by --model-config {name}=PATH, or name that model with this as its draft"
        )
        builder.decide("spec.target.model", name, message)
