"""All files of an emulated engine, below one folder."""

import json
from dataclasses import dataclass
from pathlib import Path

from specdecode_operator.capture.job.recorder_bundle import RECORDER
from specdecode_operator.replay.launch.emulation import PLUGIN, Emulation
from specdecode_operator.replay.launch.model_folder import write_model_folder


@dataclass(frozen=True)
class EngineFolder:
    """What was written for an engine."""

    plugins: Path  # goes on PYTHONPATH
    told: Path  # where the plugin tells of its steps
    arguments: list[str]  # what follows `vllm serve`, but for where it listens


def write_engine_folder(
    folder: Path, emulated: Emulation, *, tokenizer: Path | None = None, seed: int = 0, tells_steps: bool = False
) -> EngineFolder:
    """Write models without weights, the plugins, of which the recorder is one, and what they are told."""
    plugins, told = folder / "plugins", folder / "told"
    told.mkdir(parents=True)
    PLUGIN.write(plugins)
    RECORDER.write(plugins)
    text = write_model_folder(folder / "target", emulated.target_config, tokenizer)
    draft = None
    if emulated.draft_config is not None:
        draft = folder / "draft"
        write_model_folder(draft, emulated.draft_config, tokenizer, is_draft=True)
    told_where = {"folder": str(told), "tells_steps": tells_steps}
    settings = folder / "settings.json"
    settings.write_text(json.dumps(emulated.plugin_settings(text, seed) | told_where), encoding="utf-8")
    return EngineFolder(plugins, told, emulated.arguments(folder / "target", draft, settings))
