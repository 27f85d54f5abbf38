"""A plugin as a folder that an unmodified vLLM finds on its PYTHONPATH: a package, and what says where it begins."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class PluginBundle:
    """Modules of ours as a package of their own, which imports nothing else of ours."""

    package: str
    version: str
    sources: Path  # The folder of its modules
    entry_points: str  # As in a distribution's entry_points.txt

    def files(self) -> dict[str, str]:
        """Return the content of every file, by its path below the folder that goes on PYTHONPATH."""
        info = f"{self.package}-{self.version}.dist-info"
        paths = sorted(self.sources.glob("*.py"))
        modules = {f"{self.package}/{path.name}": path.read_text(encoding="utf-8") for path in paths}
        metadata = f"Metadata-Version: 2.1\nName: {self.package}\nVersion: {self.version}\n"
        return modules | {f"{info}/METADATA": metadata, f"{info}/entry_points.txt": self.entry_points}

    def write(self, folder: Path) -> list[Path]:
        """Write it below a folder, readable by every user; return its files."""
        written = []
        for name, text in self.files().items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            path.chmod(0o644)
            written.append(path)
        return written
