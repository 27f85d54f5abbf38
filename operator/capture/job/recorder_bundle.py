"""The recorder as a folder that an unmodified vLLM finds on its PYTHONPATH."""

from pathlib import Path
from typing import Final

from specdecode_operator.capture.recorder.lines import RECORDER_VERSION

PACKAGE: Final = "specdecode_recorder"
PLUGIN: Final = "specdecode_recorder"
"""Name of the entry point: what VLLM_PLUGINS must list, where it is set."""

_SOURCES: Final = Path(__file__).parents[1] / "recorder"
_METADATA: Final = f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {RECORDER_VERSION}\n"
_ENTRY_POINTS: Final = f"[vllm.stat_logger_plugins]\n{PLUGIN} = {PACKAGE}.plugin:RecorderPlugin\n"


def bundle_files() -> dict[str, str]:
    """Return the content of every file, by its path below the folder that goes on PYTHONPATH."""
    info = f"{PACKAGE}-{RECORDER_VERSION}.dist-info"
    modules = {f"{PACKAGE}/{path.name}": path.read_text(encoding="utf-8") for path in sorted(_SOURCES.glob("*.py"))}
    return modules | {f"{info}/METADATA": _METADATA, f"{info}/entry_points.txt": _ENTRY_POINTS}


def write_bundle(folder: Path) -> list[Path]:
    """Write the recorder below a folder, readable by every user; return its files."""
    written = []
    for name, text in bundle_files().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o644)
        written.append(path)
    return written
