"""Package our modules as a vLLM plugin, and start an unmodified vLLM with it."""

import io
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from specdecode_operator.version import __version__

_OLDEST_DATE = (1980, 1, 1, 0, 0, 0)  # of the zip format; the date of a build would make each build differ


@dataclass(frozen=True)
class PluginBundle:
    """Modules of this package as a self-contained package with its own distribution metadata."""

    package: str
    version: str
    sources: Path  # folder of its modules
    entry_points: str  # content of entry_points.txt
    program: str | None = None  # module whose `run` starts when Python gets the zip file as its script
    more: tuple[Path, ...] = ()  # modules from other folders

    def files(self) -> dict[str, str]:
        """Return the content of every file, by its path relative to the folder on PYTHONPATH."""
        info = f"{self.package}-{self.version}.dist-info"
        paths = sorted((*self.sources.glob("*.py"), *self.more))
        modules = {f"{self.package}/{path.name}": path.read_text(encoding="utf-8") for path in paths}
        metadata = f"Metadata-Version: 2.1\nName: {self.package}\nVersion: {self.version}\n"
        return modules | {f"{info}/METADATA": metadata, f"{info}/entry_points.txt": self.entry_points}

    def write(self, folder: Path) -> list[Path]:
        """Write the package below a folder, readable by every user; return its files."""
        written = []
        for name, text in self.files().items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            path.chmod(0o644)
            written.append(path)
        return written

    def zipped(self) -> bytes:
        """Return the package as a zip file for PYTHONPATH; equal files give equal bytes."""
        content = io.BytesIO()
        # In a zip file, Python finds a package without this file only if the folder has an entry.
        files = {f"{self.package}/__init__.py": ""} | self.files()
        if self.program is not None:
            files["__main__.py"] = f"from {self.package}.{self.program} import run\n\nrun()\n"
        with zipfile.ZipFile(content, "w") as archive:
            for name, text in sorted(files.items()):
                entry = zipfile.ZipInfo(name, _OLDEST_DATE)
                entry.external_attr = 0o644 << 16
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, text)
        return content.getvalue()

    def loaded_by(self, command: Sequence[str], place: str) -> list[str]:
        """Return a container's command with the bundle on PYTHONPATH; ``place`` is its folder or zip file.

        A shell extends the variables that image and pod set. If VLLM_PLUGINS is set, vLLM loads only those plugins.
        """
        script = (
            'export PYTHONPATH="$0${PYTHONPATH:+:$PYTHONPATH}"; '
            'if [ -n "${VLLM_PLUGINS+set}" ]; then '
            f'export VLLM_PLUGINS="${{VLLM_PLUGINS:+$VLLM_PLUGINS,}}{self.package}"; fi; '
            'exec "$@"'
        )
        return ["/bin/sh", "-c", script, place, *command]

    def unloaded(self, command: Sequence[str], place: str) -> list[str]:
        """Return the command that `loaded_by` got, or the same command if it is not a result of that."""
        head = self.loaded_by([], place)
        return list(command[len(head) :] if list(command[: len(head)]) == head else command)


_RECORDER_PACKAGE: Final = "specdecode_recorder"
RECORDER: Final = PluginBundle(
    package=_RECORDER_PACKAGE,
    version=__version__,
    # The recorder is independent of this package: its modules are shipped, not imported.
    sources=Path(__file__).parents[1] / "capture" / "recorder",
    entry_points=f"[vllm.stat_logger_plugins]\n{_RECORDER_PACKAGE} = {_RECORDER_PACKAGE}.plugin:RecorderPlugin\n",
    program="sidecar",
)
"""The recorder of captures, and the program of its sidecar."""

TRAINER: Final = PluginBundle(
    package="specdecode_trainer",
    version=__version__,
    sources=Path(__file__).parents[1] / "training" / "job",
    entry_points="",
    program="run",
    more=(RECORDER.sources / "block_hashes.py",),
)
"""The steps of a training that run in the trainer's image."""
