"""Watches the objects of some kinds, with the columns that `kubectl get` shows."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from devcluster.host.errors import ClusterError
from tests.support.api_client import ApiClient

Name = tuple[str, str]
"""Namespace and name."""

_LOOK_S: Final = 0.05
"""Interval at which a condition over all objects is checked."""
_PAUSE_S: Final = 0.5
"""Delay before an ended watch is started again."""


@dataclass(frozen=True)
class Seen:
    """Last seen state of an object."""

    generation: int
    cells: tuple[Any, ...]
    """Columns of the object; the first is its name."""
    at_s: float
    """Time of the event, on the monotonic clock."""


class NotInTimeError(Exception):
    """A condition was not met before its deadline."""


class Watched:
    """The objects of one kind in all namespaces."""

    def __init__(self, kubeconfig: Path, kind: str, selector: str = "") -> None:
        # Each watch has its own connection.
        self._client = ApiClient(kubeconfig.read_text())
        self._kind, self._selector = kind, selector
        self._objects: dict[Name, Seen] = {}
        self._changing = threading.Lock()
        self._ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def end(self) -> None:
        """End the watch."""
        self._ended.set()

    def wait(
        self,
        reached: Callable[[dict[Name, Seen]], bool],
        what: str,
        deadline_s: float,
        check: Callable[[], None],
    ) -> None:
        """Wait until the objects meet a condition. ``check`` raises an error if waiting is useless.

        Raises
        ------
        NotInTimeError
            When the deadline has passed.
        """
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            with self._changing:
                if reached(self._objects):
                    return
            check()
            time.sleep(_LOOK_S)
        raise NotInTimeError(f"{what}: not within {deadline_s:.0f} s; found {len(self._objects)} {self._kind}")

    def count(self, chosen: Callable[[Seen], bool]) -> int:
        """Return the number of objects that meet a condition."""
        with self._changing:
            return sum(map(chosen, self._objects.values()))

    def seen(self, name: Name) -> Seen:
        """Return an existing object."""
        with self._changing:
            return self._objects[name]

    def generations(self) -> dict[Name, int]:
        """Return the generation of each object, which the API server increases with each change of the spec."""
        with self._changing:
            return {name: seen.generation for name, seen in self._objects.items()}

    def _watch(self) -> None:
        while not self._ended.is_set():
            with suppress(ClusterError):
                with self._changing:
                    self._objects.clear()
                for event, row in self._client.watch_rows(self._kind, self._selector):
                    if self._ended.is_set():
                        return
                    self._take(event, row)
            self._ended.wait(_PAUSE_S)

    def _take(self, event: str, row: dict[str, Any]) -> None:
        metadata = row["object"]["metadata"]
        name = (metadata["namespace"], metadata["name"])
        with self._changing:
            if event == "DELETED":
                self._objects.pop(name, None)
            else:
                self._objects[name] = Seen(metadata.get("generation", 0), tuple(row["cells"]), time.monotonic())
