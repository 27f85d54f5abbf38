"""The recorder as a folder that an unmodified vLLM finds on its PYTHONPATH."""

from pathlib import Path
from typing import Final

from specdecode_operator.capture.job.plugin_bundle import PluginBundle
from specdecode_operator.capture.recorder.lines import RECORDER_VERSION

PLUGIN: Final = "specdecode_recorder"
"""Name of the entry point: what VLLM_PLUGINS must list, where it is set."""

SWITCHER: Final = "switcher.py"
"""The script in the bundle that starts engines."""

RECORDER: Final = PluginBundle(
    package=PLUGIN,
    version=RECORDER_VERSION,
    sources=Path(__file__).parents[1] / "recorder",
    entry_points=f"[vllm.stat_logger_plugins]\n{PLUGIN} = {PLUGIN}.plugin:RecorderPlugin\n",
)


SWITCH_FOLDER: Final = "/specdecode/switch"
"""What the engine's container and the load generator's share: orders, and what became of them."""


def switcher_command(recorder: str, folder: str = SWITCH_FOLDER) -> list[str]:
    """Return the command of an engine's container that starts the engine that it is told to start.

    ``recorder`` is the folder with the bundle. What the image has in Python's variables is for engines alone.
    """
    return ["python3", "-I", f"{recorder}/{PLUGIN}/{SWITCHER}", folder]


def write_bundle(folder: Path) -> list[Path]:
    """Write the recorder below a folder, readable by every user; return its files."""
    return RECORDER.write(folder)
