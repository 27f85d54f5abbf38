"""Faults that are put into the operator on purpose, to see whether the hunt finds them."""

import shutil
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hunt.states import REPOSITORY

_LIST: Final = Path(__file__).with_name("seeded_faults.toml")
_OPERATOR: Final = REPOSITORY / "operator"


@dataclass(frozen=True)
class SeededFault:
    """One wrong change: a text of a file of the operator, and what stands there in its place."""

    name: str
    file: str
    old: str
    new: str

    def is_stale(self) -> bool:
        """Whether the operator's code has moved on, so that it cannot be made."""
        path = _OPERATOR / self.file
        return not path.exists() or path.read_text().count(self.old) != 1

    @contextmanager
    def made(self, folder: Path) -> Iterator[dict[str, str]]:
        """Make it in a copy of the operator; yield the environment in which Python takes the copy."""
        package = folder / "specdecode_operator"
        shutil.copytree(_OPERATOR, package, ignore=shutil.ignore_patterns("__pycache__"))
        changed = package / self.file
        changed.write_text(changed.read_text().replace(self.old, self.new))
        try:
            yield {"PYTHONPATH": str(folder)}
        finally:
            shutil.rmtree(folder)


def seeded_faults() -> list[SeededFault]:
    """Return all faults, in the order of the list."""
    return [SeededFault(**each) for each in tomllib.loads(_LIST.read_text())["fault"]]
