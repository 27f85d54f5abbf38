"""The command line of a spec that our rules refuse, as if they did not."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.speculation import ServedModel
from specdecode_operator.deployment import validation
from specdecode_operator.problems import InvalidSpecError, Problem
from specdecode_operator.sizing.catalogue import find_entry
from specdecode_operator.vllm.settings import EngineSettings
from tests.support.engine_settings import replace


def settings_despite(body: Mapping[str, Any], folder: Path) -> tuple[EngineSettings, list[Problem]]:
    """Return what the engine would be told of a spec, with models written to a folder, and what our rules say of it."""
    spec = SpecDecodeDeploymentSpec.model_validate(body)
    resolved: list[EngineSettings] = []
    told: list[Problem] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validation, "engine_settings", _remembering(validation.engine_settings, resolved))
        try:
            validation.valid_facts(spec)
        except InvalidSpecError as error:
            told = list(error.problems)
    (settings,) = resolved
    return _with_models(settings, spec, folder), told


def _remembering(resolve: Any, resolved: list[EngineSettings]) -> Any:
    def remember(*arguments: Any) -> EngineSettings:
        settings: EngineSettings = resolve(*arguments)
        resolved.append(settings)
        return settings

    return remember


def _with_models(settings: EngineSettings, spec: SpecDecodeDeploymentSpec, folder: Path) -> EngineSettings:
    """Return settings whose models are folders with a config.json."""
    settings = replace(settings, model=_written(spec.target, folder / "target"))
    draft = spec.speculation.draft if spec.speculation else None
    if draft is None or settings.speculation is None:
        return settings
    return replace(settings, speculation=replace(settings.speculation, draft_model=_written(draft, folder / "draft")))


def _written(model: ServedModel, folder: Path) -> str:
    entry = find_entry(model.model)
    config = model.config if model.config is not None else entry.config if entry else {}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)
