"""The recorder as a folder that an unmodified vLLM finds on its PYTHONPATH."""

from pathlib import Path
from typing import Final

from specdecode_operator.capture.job.plugin_bundle import PluginBundle
from specdecode_operator.capture.recorder.lines import RECORDER_VERSION

PLUGIN: Final = "specdecode_recorder"
"""Name of the entry point: what VLLM_PLUGINS must list, where it is set."""

RECORDER: Final = PluginBundle(
    package=PLUGIN,
    version=RECORDER_VERSION,
    sources=Path(__file__).parents[1] / "recorder",
    entry_points=f"[vllm.stat_logger_plugins]\n{PLUGIN} = {PLUGIN}.plugin:RecorderPlugin\n",
)


def write_bundle(folder: Path) -> list[Path]:
    """Write the recorder below a folder, readable by every user; return its files."""
    return RECORDER.write(folder)
