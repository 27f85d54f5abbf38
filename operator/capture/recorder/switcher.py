"""Run the engines of several arms in one container, one at a time, on the load generator's orders.

Runs as a script with the python3 of the engine's image, with only the standard library. Orders and states are files in
a shared folder. Each is written under another name and renamed, so that a reader never sees a partial file. An engine
counts as stopped when every process that it started is gone, because the next one needs its port and GPU memory.
"""

import ctypes
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ORDER_FILE, STATE_FILE = "order.json", "state.json"
RUNNING, STOPPED, ENDED = "running", "stopped", "ended"
NOT_STARTED = 127  # exit code where a command cannot be run, as of a shell
_LARGEST_ORDER_BYTES = 2**20
_LARGEST_NUMBER = 2**53
_POLL_S = 0.1
_PR_SET_CHILD_SUBREAPER = 36
_BY_SIGNAL = 128


@dataclass(frozen=True)
class Grace:
    """Time limits for stopping an engine, in seconds."""

    told_s: float = 90.0  # after SIGTERM; longer than vLLM waits for open requests (--shutdown-timeout)
    rest_s: float = 10.0  # for its other processes, after it has ended


class BadOrderError(ValueError):
    """A file is not a valid order."""


@dataclass(frozen=True)
class Order:
    """Order to run an engine, or to stop it."""

    number: int  # greater than that of every earlier one
    command: list[str] | None  # None: nothing
    env: dict[str, str]  # added to the container's


def read_order(path: Path) -> Order | None:
    """Return the order in a file, if it exists."""
    try:
        # Does not follow a link, or wait for the writer of a pipe.
        opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadOrderError(error.strerror) from error
    with os.fdopen(opened, "rb") as stream:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise BadOrderError("not a regular file")
        text = stream.read(_LARGEST_ORDER_BYTES + 1)
    if len(text) > _LARGEST_ORDER_BYTES:
        raise BadOrderError(f"more than {_LARGEST_ORDER_BYTES} bytes")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadOrderError("invalid JSON") from error
    return _order(document)


def _order(document: Any) -> Order:
    if not isinstance(document, dict) or document.keys() != {"number", "command", "env"}:
        raise BadOrderError("not number, command and env")
    number, command, env = document["number"], document["command"], document["env"]
    if type(number) is not int or not 0 < number <= _LARGEST_NUMBER:
        raise BadOrderError("number is not a positive integer")
    if command is not None and not (
        isinstance(command, list) and command and command[0] and all(map(_passes, command))
    ):
        raise BadOrderError("command is not a list of words")
    if not isinstance(env, dict) or not all(key and "=" not in key and _passes(key) for key in env):
        raise BadOrderError("env has invalid names of variables")
    if not all(map(_passes, env.values())):
        raise BadOrderError("env has invalid values of variables")
    return Order(number, command, env)


def _passes(word: Any) -> bool:
    """Return whether a word can be passed to a process."""
    if not isinstance(word, str) or "\0" in word:
        return False
    try:
        os.fsencode(word)
    except UnicodeEncodeError:
        return False
    return True


class Engine:
    """One engine, and all processes that it started."""

    def __init__(self, order: Order) -> None:
        """Start it."""
        assert order.command is not None  # noqa: S101  an order to stop starts nothing
        # In its own process group, so that its signals do not reach the switcher.
        self._process = subprocess.Popen(  # noqa: S603  what it is told to run is why it is there
            order.command, env={**os.environ, **order.env}, stdin=subprocess.DEVNULL, start_new_session=True
        )
        self.exit_code: int | None = None

    @property
    def shown_code(self) -> int:
        """Exit code as a shell, and so Kubernetes, shows it."""
        code = self.exit_code or 0
        return _BY_SIGNAL - code if code < 0 else code

    def reap(self) -> bool:
        """Reap ended processes; return whether any is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._process.pid:
                self.exit_code = self._process.returncode = os.waitstatus_to_exitcode(status)

    def end(self, grace: Grace) -> None:
        """Send SIGTERM, kill processes that take too long, and return when no process is left."""
        if self.exit_code is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGTERM)
            _wait_until(lambda: not self.reap() or self.exit_code is not None, grace.told_s)
        _wait_until(lambda: not self.reap(), 0.0 if self.exit_code is None else grace.rest_s)
        while self.reap():
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            # Processes that left the group become our children when their parents end.
            for child in _children():
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            time.sleep(_POLL_S)


def _children() -> list[int]:
    own = os.getpid()
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The fields after the name, which is in brackets and may contain anything: state, parent.
            _, _, after = path.read_text(encoding="utf-8", errors="replace").rpartition(")")
            if int(after.split()[1]) == own:
                found.append(int(path.parent.name))
    return found


def _wait_until(condition: Callable[[], bool], within_s: float) -> None:
    until_s = time.monotonic() + within_s
    while not condition() and time.monotonic() < until_s:
        time.sleep(_POLL_S)


class Switcher:
    """Follows the orders in a folder."""

    def __init__(self, folder: Path, grace: Grace) -> None:
        self._folder = folder
        self._grace = grace
        self._engine: Engine | None = None
        self._told_to_end = False
        self._complained: str | None = None
        self._number = 0  # of the last order that was followed
        try:
            last = json.loads((folder / STATE_FILE).read_bytes())
            self._number, state = int(last["number"]), last["state"]
        except FileNotFoundError:
            return
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise SystemExit(f"switcher: {STATE_FILE} was modified") from error
        if state == RUNNING:  # the engine ended with the previous start of the container
            self._say(ENDED, None)

    def tell_to_end(self, *_: Any) -> None:
        """End after stopping the engine: the handler of Kubernetes' signal."""
        self._told_to_end = True

    def run(self) -> int:
        """Follow orders until SIGTERM, or until the engine exits; return the exit code."""
        while not self._told_to_end:
            order = self._next_order()
            if order is not None and (failed := self._follow(order)) is not None:
                return failed
            if self._engine is not None:
                self._engine.reap()
                if self._engine.exit_code is not None:
                    self._say(ENDED, self._engine.shown_code)
                    code = self._engine.shown_code
                    self._engine.end(self._grace)
                    return code
            time.sleep(_POLL_S)
        return self._stop()

    def _next_order(self) -> Order | None:
        try:
            order = read_order(self._folder / ORDER_FILE)
        except BadOrderError as error:
            self._complain(f"{ORDER_FILE} is ignored: {error}")
            return None
        return order if order is not None and order.number > self._number else None

    def _follow(self, order: Order) -> int | None:
        """Stop the running engine and start the ordered one; return the exit code if that fails."""
        self._stop()
        self._number = order.number
        if order.command is None:
            self._say(STOPPED, None)
            return None
        try:
            self._engine = Engine(order)
        except OSError as error:
            self._complain(f"{order.command[0]} cannot be run: {error.strerror}")
            self._say(ENDED, NOT_STARTED)
            return NOT_STARTED
        self._say(RUNNING, None)
        return None

    def _stop(self) -> int:
        """Stop the engine; return its exit code, or 0 without an engine."""
        if self._engine is None:
            return 0
        self._engine.end(self._grace)
        code, self._engine = self._engine.shown_code, None
        return code

    def _say(self, state: str, exit_code: int | None) -> None:
        part = self._folder / f"{STATE_FILE}.part"
        part.write_text(json.dumps({"number": self._number, "state": state, "exit_code": exit_code}), encoding="utf-8")
        part.chmod(0o644)  # for the load generator, another user, despite the image's umask
        part.replace(self._folder / STATE_FILE)

    def _complain(self, words: str) -> None:
        if words != self._complained:
            sys.stderr.write(f"switcher: {words}\n")
            self._complained = words


def main(folder: Path, grace: Grace = Grace()) -> int:
    """Follow the orders in a folder; return the exit code."""
    # Orphaned processes of an engine become our children, so that their end is noticed. A container's first process
    # has them anyway.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    switcher = Switcher(folder, grace)
    _on_signals(switcher.tell_to_end)
    code = switcher.run()
    # Python would restore the default handlers at exit, and a signal would change the exit code.
    _on_signals(signal.SIG_IGN)
    return code


def _on_signals(handler: Any) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
