"""Reads a folder of facts files and follows its changes."""

import hashlib
import json
import logging
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Final

from specdecode_operator.deployment.models.model_facts import SiteFacts
from specdecode_operator.problems import printable, shown
from specdecode_operator.redaction import clip
from specdecode_operator.resolver.read_model_facts import Checkpoint
from specdecode_operator.sizing.families.catalogue import find_entry

MOST_FILES: Final = 1_000
MOST_FILE_BYTES: Final = 2**20
"""As large as a ConfigMap can be."""

MOST_BYTES: Final = 8 * 2**20
"""Total size of the files that are read: eight full ConfigMaps."""

_LONGEST_PROBLEM: Final = 500
_MOST_PROBLEMS: Final = 20
"""Problems that are logged at a time."""

_logger = logging.getLogger(__name__)

ReadFacts = Callable[[Path], Mapping[str, Checkpoint]]
"""Returns the facts in one file by model id; raises FactsFileError."""

_Signature = tuple[tuple[str, int, int, int], ...]
"""Name, inode, time of change in ns and size in bytes of each file."""


class FactsFileError(Exception):
    """A facts file that cannot be used: file, field, what is wrong and how to fix it, in one line."""


class FactsFolder:
    """Follows a folder of facts files: changes count without a restart.

    The folder may be absent, because the ConfigMap that is mounted there is optional. A broken file is logged once.
    It affects no other file, and its last valid facts stay in force.
    """

    def __init__(self, folder: Path | None = None, read_file: ReadFacts = lambda _: {}) -> None:
        self._folder = folder
        self._read_file = read_file
        self._seen: _Signature = ()
        self._by_file: dict[str, Mapping[str, SiteFacts]] = {}
        """The last good content of each file that is there."""
        self._facts: Mapping[str, SiteFacts] = {}
        self._told: frozenset[str] = frozenset()

    def read(self) -> Mapping[str, SiteFacts]:
        """Return the facts that the folder holds, by model id without outer slashes."""
        if self._folder is None:
            return self._facts
        try:
            signature = _signature(self._folder)
        except OSError as error:
            self._tell([f"{self._folder}: {error.strerror}; the last facts that were read stay in force"])
            return self._facts
        if signature != self._seen:
            self._seen = signature
            problems = list(self._take(self._folder, signature))
            _logger.info("%s: number of models with facts: %d", self._folder, len(self._facts))
            self._tell(problems)
        return self._facts

    def _take(self, folder: Path, signature: _Signature) -> Iterator[str]:
        """Read all files; yield what is wrong with each that is not used."""
        before, self._by_file = self._by_file, {}
        facts: dict[str, SiteFacts] = {}
        left_bytes = MOST_BYTES
        for number, (name, _, _, size_bytes) in enumerate(signature):
            path = folder / name
            if number >= MOST_FILES:
                yield f"{folder}: {len(signature):,} files; only the first {MOST_FILES:,} are read; remove some"
                break
            if size_bytes > min(MOST_FILE_BYTES, left_bytes):
                yield (
                    f"{path}: {size_bytes:,} bytes exceed the limit of {MOST_FILE_BYTES:,} per file or"
                    f" {MOST_BYTES:,} in total; create the file again with specdecode models add, or remove other files"
                )
                continue
            left_bytes -= size_bytes
            try:
                found = self._read_file(path)
                self._by_file[name] = {model: _site_facts(name, each) for model, each in found.items()}
            except FactsFileError as error:
                yield from self._kept(name, before, str(error))
            except Exception as error:  # noqa: BLE001  one file must not stop the operator
                why = f"{path}: internal error ({type(error).__name__}) while reading it; please report it"
                yield from self._kept(name, before, why)
            for model, given in self._by_file.get(name, {}).items():
                if problem := _not_used(model, facts):
                    yield f"{path}: model: {shown(model)}: {problem}"
                else:
                    facts[model.strip("/")] = given
        self._facts = facts

    def _kept(self, name: str, before: Mapping[str, Mapping[str, SiteFacts]], why: str) -> Iterator[str]:
        """Keep the last good content of a broken file, if there is one."""
        if name in before:
            self._by_file[name] = before[name]
            why = f"{why}; its last valid facts stay in force"
        yield why

    def _tell(self, problems: list[str]) -> None:
        """Log problems that the folder did not have before."""
        told = self._told
        self._told = frozenset(problems)
        new = [each for each in problems if each not in told]
        for each in new[:_MOST_PROBLEMS]:
            _logger.warning("facts file not used: %s", clip(printable(each), _LONGEST_PROBLEM))
        if len(new) > _MOST_PROBLEMS:
            _logger.warning(
                "facts files not used: %d more problems are not shown; fix these first", len(new) - _MOST_PROBLEMS
            )


def _signature(folder: Path) -> _Signature:
    """Return what tells whether a file has changed; a mounted ConfigMap changes by links to new files."""
    found = []
    try:
        names = sorted(path.name for path in folder.iterdir())
    except FileNotFoundError:
        return ()
    for name in names:
        if name.startswith("."):  # Kubelet's own links and folders
            continue
        try:
            known = (folder / name).stat()
        except FileNotFoundError:  # removed meanwhile
            continue
        if stat.S_ISREG(known.st_mode):
            found.append((name, known.st_ino, known.st_mtime_ns, known.st_size))
    return tuple(found)


def _not_used(model: str, facts: Mapping[str, SiteFacts]) -> str | None:
    """Return why facts about a model are not used; None if they are."""
    if find_entry(model) is not None:
        return "the catalogue takes precedence for this model; remove the file"
    if (other := facts.get(model.strip("/"))) is not None:
        return f"{printable(other.file)} has facts about this model too; remove one of the files"
    return None


def _site_facts(file: str, checkpoint: Checkpoint) -> SiteFacts:
    digest = hashlib.sha256(json.dumps(asdict(checkpoint), sort_keys=True).encode()).hexdigest()
    return SiteFacts(file, digest, checkpoint)
