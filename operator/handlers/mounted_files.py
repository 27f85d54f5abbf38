"""Reload mounted configuration files, the calibration file and the facts folder, without a restart.

Either may be absent, because the ConfigMaps behind them are optional. An invalid file is logged once, and its last
valid content stays in force.
"""

import asyncio
import hashlib
import json
import logging
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from specdecode_operator.deployment.models.checkpoint_reader import Checkpoint
from specdecode_operator.deployment.models.facts_files import FactsFileError, facts_in
from specdecode_operator.deployment.models.model_facts import SiteFacts
from specdecode_operator.problems import printable, shown
from specdecode_operator.redaction import clip
from specdecode_operator.sizing.calibration import UNCALIBRATED, Calibration, CalibrationError, parse_calibration
from specdecode_operator.sizing.catalogue import find_entry

_logger = logging.getLogger(__name__)


class CalibrationFile:
    """Follows a calibration file: what changes in it counts without a restart.

    The file may be absent, for the ConfigMap that holds it is optional. It is
    read whole each time: it is small, and a mounted ConfigMap changes by links
    whose times say little.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._seen: str | None = None
        """What was last read or went wrong: each is told once."""
        self._calibration = UNCALIBRATED

    def read(self) -> Calibration:
        """Return what the file holds; empty where there is none, and the last good one where it is broken."""
        if self._path is None:
            return UNCALIBRATED
        try:
            text = self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            self._take(self._path, None)
        except (OSError, UnicodeDecodeError) as error:
            self._refuse(self._path, str(error))
        else:
            self._take(self._path, text)
        return self._calibration

    def _take(self, path: Path, text: str | None) -> None:
        if text == self._seen:
            return
        try:
            self._calibration = UNCALIBRATED if text is None else parse_calibration(text)
        except CalibrationError as error:
            self._refuse(path, str(error), seen=text)
            return
        self._seen = text
        if text is None:
            _logger.info("%s is gone: estimates are no longer corrected", path)
        else:
            _logger.info("%s corrects estimates by %d measurements", path, len(self._calibration.entries))

    def _refuse(self, path: Path, why: str, seen: str | None = None) -> None:
        """Say once why the file as it is now is not used."""
        seen = seen or why
        if seen != self._seen:
            self._seen = seen
            _logger.warning("%s: %s; what it held before stays in force", path, why)


MOST_FILES: Final = 1_000
MOST_FILE_BYTES: Final = 2**20
"""As large as a ConfigMap can be."""

MOST_BYTES: Final = 8 * 2**20
"""Total size of the files that are read: eight full ConfigMaps."""

_LONGEST_PROBLEM: Final = 500
_MOST_PROBLEMS: Final = 20
"""Problems that are logged at a time."""


ReadFacts = Callable[[Path], Mapping[str, Checkpoint]]
"""Returns the facts in one file by model id; raises FactsFileError, or OSError if the file cannot be read."""

_Stamp = tuple[str, int, int, int]
"""Name, inode, time of change in ns and size in bytes of one file: what tells whether it has changed."""


@dataclass(frozen=True)
class _File:
    """What was last read of one file."""

    stamp: _Stamp
    facts: Mapping[str, SiteFacts] | None = None  # The last valid ones; None if there never were any
    problem: str | None = None
    try_again: bool = False  # Whether reading it failed for a cause that may pass


def read_facts_file(path: Path) -> Mapping[str, Checkpoint]:
    """Return the facts in one file by the rules of ``specdecode plan --facts``.

    Raises
    ------
    FactsFileError
        If it holds no facts, or facts that cannot be used.
    OSError
        If it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise FactsFileError(f"{_place(path)}: is not UTF-8 text: write it with specdecode models add") from error
    found = facts_in(text, _place(path), is_json=path.suffix == ".json")
    if not found:
        raise FactsFileError(f"{_place(path)}: holds no facts: write it with specdecode models add")
    return found


class FactsFolder:
    """Follows a folder of facts files: changes count without a restart. Several threads may read it.

    The event loop looks at it in a thread, because files of 8 MiB may take seconds to parse, and takes what it found.

    The folder may be absent, because the ConfigMap that is mounted there is optional. A broken file is logged once.
    It affects no other file, and its last valid facts stay in force.
    """

    def __init__(self, folder: Path | None = None, read_file: ReadFacts = read_facts_file) -> None:
        self._folder = folder
        self._read_file = read_file
        self._files: dict[str, _File] = {}
        self._stamps: tuple[_Stamp, ...] = ()
        self._facts: Mapping[str, SiteFacts] = {}
        self._told: frozenset[str] = frozenset()
        # The threads of event loop and admission webhook read it.
        self._lock = threading.Lock()

    @property
    def known(self) -> Mapping[str, SiteFacts]:
        """Facts that the last look found, by model id without outer slashes; reads nothing."""
        return self._facts

    async def look(self) -> None:
        """Look at the folder in another thread."""
        if self._folder is not None:
            await asyncio.to_thread(self.read)

    def read(self) -> Mapping[str, SiteFacts]:
        """Look at the folder, and return the facts that it holds, by model id without outer slashes."""
        if self._folder is None:
            return self._facts
        with self._lock:
            self._follow(self._folder)
            return self._facts

    def _follow(self, folder: Path) -> None:
        try:
            stamps = _stamps(folder)
        except OSError as error:
            self._tell([f"{folder}: {error.strerror}; the last facts that were read stay in force"])
            return
        if stamps == self._stamps and not any(each.try_again for each in self._files.values()):
            return
        problems = list(self._take(folder, stamps))
        if stamps != self._stamps:
            _logger.info("%s: number of models with facts: %d", folder, len(self._facts))
        self._stamps = stamps
        self._tell(problems)

    def _take(self, folder: Path, stamps: tuple[_Stamp, ...]) -> Iterator[str]:
        """Read the files that have changed; yield what is wrong with each that is not used."""
        files: dict[str, _File] = {}
        facts: dict[str, SiteFacts] = {}
        left_bytes = MOST_BYTES
        for number, stamp in enumerate(stamps):
            name, _, _, size_bytes = stamp
            place = _place(folder / name)
            if number >= MOST_FILES:
                yield f"{folder}: {len(stamps):,} files; only the first {MOST_FILES:,} are read; remove some"
                break
            file = self._read(folder / name, stamp, left_bytes)
            if size_bytes <= min(MOST_FILE_BYTES, left_bytes):
                left_bytes -= size_bytes
            files[name] = file
            if file.problem is not None:
                yield file.problem if file.facts is None else f"{file.problem}; its last valid facts stay in force"
            for model, given in (file.facts or {}).items():
                if problem := _not_used(model, facts):
                    yield f"{place}: model: {shown(model)}: {problem}"
                else:
                    facts[model.strip("/")] = given
        self._files, self._facts = files, facts

    def _read(self, path: Path, stamp: _Stamp, left_bytes: int) -> _File:
        """Return what a file holds; its last valid facts where it is broken."""
        before = self._files.get(path.name)
        last = None if before is None else before.facts
        if stamp[-1] > min(MOST_FILE_BYTES, left_bytes):
            problem = (
                f"{_place(path)}: {stamp[-1]:,} bytes exceed the limit of {MOST_FILE_BYTES:,} per file or"
                f" {MOST_BYTES:,} in total; create the file again with specdecode models add, or remove other files"
            )
            # It may be small enough when others are removed.
            return _File(("", 0, 0, 0), last, problem)
        if before is not None and before.stamp == stamp and not before.try_again:
            return before
        try:
            found = self._read_file(path)
            return _File(stamp, {model: _site_facts(path.name, each) for model, each in found.items()})
        except FactsFileError as error:
            return _File(stamp, last, str(error))
        except OSError as error:
            return _File(stamp, last, f"{_place(path)}: {error.strerror}", try_again=True)
        except Exception as error:  # noqa: BLE001  one file must not stop the operator
            return _File(
                stamp,
                last,
                f"{_place(path)}: internal error ({type(error).__name__}) while reading it; please report it",
            )

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


def _place(path: Path) -> str:
    """Return how the log names a file.

    The folder comes last: a file may be called ``password``, and what follows that and a colon is masked as a secret.
    """
    return f"{path.name} in {path.parent}"


def _stamps(folder: Path) -> tuple[_Stamp, ...]:
    """Return the files of a folder; a mounted ConfigMap changes by links to new files."""
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
        except OSError:
            # Reading it tells what is wrong.
            found.append((name, 0, 0, 0))
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
