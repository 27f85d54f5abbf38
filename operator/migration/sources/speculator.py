"""Speculation of KServe's LLMInferenceService: its fields as --speculative-config.

Source: kserve/kserve#5687 (spec.speculator) and #5370 (spec.speculativeDecoding), which pass a map to vLLM.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from specdecode_operator.kube.untyped import mapping
from specdecode_operator.migration.sources.model_storage import draft_name
from specdecode_operator.migration.sources.workload import Remarks

_FIELDS: Final = ("speculator", "speculativeDecoding")
_MODELS: Final = ("model", "draftModel", "speculatorModel")
_MODEL_READ: Final = ("uri", "name")
_CONFIGS: Final = ("config", "ngram", "suffix")
"""Maps whose keys are vLLM's."""

_KSERVE_METHODS: Final = {"draft-target": "draft_model", "draft_target": "draft_model"}


@dataclass(frozen=True)
class Speculator:
    """How a server speculates, and where its draft is stored."""

    words: tuple[str, ...] = ()
    """Arguments of the server; empty without speculation."""

    uri: str | None = None
    """Address of the draft; None for methods without one."""


def read_speculator(spec: Mapping[str, Any], remarks: Remarks) -> Speculator:
    """Return the arguments that the controller writes for the speculation of a spec."""
    field = next((each for each in _FIELDS if mapping(spec, each)), None)
    if field is None:
        return Speculator()
    given = mapping(spec, field)
    config: dict[str, Any] = {}
    uri = None
    for key, value in given.items():
        if key in _MODELS:
            model = value if isinstance(value, dict) else {"uri": value}
            uri = str(model.get("uri") or "") or None
            remarks.ask_for_rest(model, _MODEL_READ, f"spec.{field}.{key}")
        elif key in _CONFIGS and isinstance(value, dict):
            config |= {_snake(str(name)): part for name, part in value.items()}
        else:
            config[_snake(key)] = value
    if "method" in config:
        config["method"] = _KSERVE_METHODS.get(str(config["method"]), config["method"])
    if uri:
        config["model"] = draft_name(uri)
    remarks.own(f"spec.{field}", "becomes spec.speculation, as the controller writes --speculative-config of it")
    return Speculator(("--speculative-config", json.dumps(config)), uri)


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").lower()
