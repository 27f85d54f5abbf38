"""Run the engines of several arms in one container, one at a time, on the load generator's orders.

Runs as a script by the python3 of the engine's image, on the standard library alone. Orders and answers are files
in a folder that the load generator's container shares. Each is written beside its name and renamed, so that a
reader never sees half of one. An engine counts as stopped when every process that it started is gone: the next one
needs its port and its GPU memory.
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
    """How long an engine may take to end by itself, in seconds."""

    told_s: float = 90.0  # from when it was told: longer than vLLM waits for answers under way (--shutdown-timeout)
    rest_s: float = 10.0  # what it started, from when it ended itself


class BadOrderError(ValueError):
    """A file that is no order."""


@dataclass(frozen=True)
class Order:
    """What is to run from now on."""

    number: int  # greater than that of every earlier one
    command: list[str] | None  # None: nothing
    env: dict[str, str]  # beside the container's own


def read_order(path: Path) -> Order | None:
    """Return the order in a file; None while there is none.

    Raises
    ------
    BadOrderError
        When it is anything but a whole order.
    """
    try:
        # Neither follows a link nor waits for the writer of a pipe.
        opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadOrderError(error.strerror) from error
    with os.fdopen(opened, "rb") as stream:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise BadOrderError("no regular file")
        text = stream.read(_LARGEST_ORDER_BYTES + 1)
    if len(text) > _LARGEST_ORDER_BYTES:
        raise BadOrderError(f"more than {_LARGEST_ORDER_BYTES} bytes")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadOrderError("no JSON") from error
    return _order(document)


def _order(document: Any) -> Order:
    if not isinstance(document, dict) or document.keys() != {"number", "command", "env"}:
        raise BadOrderError("not number, command and env")
    number, command, env = document["number"], document["command"], document["env"]
    if type(number) is not int or not 0 < number <= _LARGEST_NUMBER:
        raise BadOrderError("number is no positive integer")
    if command is not None and not (
        isinstance(command, list) and command and command[0] and all(map(_passes, command))
    ):
        raise BadOrderError("command is no list of words")
    if not isinstance(env, dict) or not all(key and "=" not in key and _passes(key) for key in env):
        raise BadOrderError("env has names that no variable has")
    if not all(map(_passes, env.values())):
        raise BadOrderError("env has values that no variable has")
    return Order(number, command, env)


def _passes(word: Any) -> bool:
    """Whether a process can be given a word."""
    if not isinstance(word, str) or "\0" in word:
        return False
    try:
        os.fsencode(word)
    except UnicodeEncodeError:
        return False
    return True


class Engine:
    """One engine, and everything that it started."""

    def __init__(self, order: Order) -> None:
        """Start it.

        Raises
        ------
        OSError
            When its command cannot be run.
        """
        assert order.command is not None  # noqa: S101  an order to stop starts nothing
        # In a group of its own: signals for it are not for us.
        self._process = subprocess.Popen(  # noqa: S603  what it is told to run is why it is there
            order.command, env={**os.environ, **order.env}, stdin=subprocess.DEVNULL, start_new_session=True
        )
        self.exit_code: int | None = None

    def reap(self) -> bool:
        """Take note of what ended; return whether anything is left."""
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
        """Tell it to end, and return when nothing of it is left; what takes too long is killed."""
        if self.exit_code is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGTERM)
            _wait_until(lambda: not self.reap() or self.exit_code is not None, grace.told_s)
        rest_s = 0.0 if self.exit_code is None else grace.rest_s
        _wait_until(lambda: not self.reap(), rest_s)
        while self.reap():
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            # Those that left the group are children of ours as soon as their parents are gone.
            for child in _children():
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            time.sleep(_POLL_S)


def _children() -> list[int]:
    own = os.getpid()
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # After the name, which is in brackets and may hold anything: state, parent.
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
        self._number = self._begin()

    def tell_to_end(self, *_: Any) -> None:
        """End, and have the engine end before: what Kubernetes asks for by a signal."""
        self._told_to_end = True

    def run(self) -> int:
        """Follow orders until it is told to end, or the engine ended by itself; return the exit code."""
        while not self._told_to_end:
            order = self._next_order()
            if order is not None and (failed := self._follow(order)) is not None:
                return failed
            if self._engine is not None:
                self._engine.reap()
                if self._engine.exit_code is not None:
                    return self._ended(self._engine)
            time.sleep(_POLL_S)
        return self._stop() or 0

    def _begin(self) -> int:
        """Return the number of the last order that was followed; an engine of an earlier start is gone with it."""
        try:
            last = json.loads((self._folder / STATE_FILE).read_bytes())
            number, state = int(last["number"]), last["state"]
        except FileNotFoundError:
            return 0
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise SystemExit(f"switcher: {STATE_FILE} is not what it wrote") from error
        if state == RUNNING:
            self._say(number, ENDED, None)
        return number

    def _next_order(self) -> Order | None:
        try:
            order = read_order(self._folder / ORDER_FILE)
        except BadOrderError as error:
            self._complain(f"{ORDER_FILE} is not followed: {error}")
            return None
        return order if order is not None and order.number > self._number else None

    def _follow(self, order: Order) -> int | None:
        """Stop what runs and start what shall; return the exit code where that cannot be."""
        self._stop()
        self._number = order.number
        if order.command is None:
            self._say(order.number, STOPPED, None)
            return None
        try:
            self._engine = Engine(order)
        except OSError as error:
            self._complain(f"{order.command[0]} cannot be run: {error.strerror}")
            self._say(order.number, ENDED, NOT_STARTED)
            return NOT_STARTED
        self._say(order.number, RUNNING, None)
        return None

    def _stop(self) -> int | None:
        """Have the engine end; return its exit code, None where none ran."""
        if self._engine is None:
            return None
        self._engine.end(self._grace)
        code, self._engine = _shown(self._engine), None
        return code

    def _ended(self, engine: Engine) -> int:
        code = _shown(engine)
        self._say(self._number, ENDED, code)
        engine.end(self._grace)
        return code

    def _say(self, number: int, state: str, exit_code: int | None) -> None:
        part = self._folder / f"{STATE_FILE}.part"
        part.write_text(json.dumps({"number": number, "state": state, "exit_code": exit_code}), encoding="utf-8")
        part.chmod(0o644)  # the load generator is another user, whatever the umask of the image
        part.replace(self._folder / STATE_FILE)

    def _complain(self, words: str) -> None:
        if words != self._complained:
            sys.stderr.write(f"switcher: {words}\n")
            self._complained = words


def _shown(engine: Engine) -> int:
    """Return an exit code as a shell, and so Kubernetes, shows it."""
    code = engine.exit_code or 0
    return _BY_SIGNAL - code if code < 0 else code


def main(folder: Path, grace: Grace = Grace()) -> int:
    """Follow the orders in a folder; return the exit code."""
    # What an engine's processes leave behind comes to us, and so it is known when all of it is gone. As a container's
    # first process we have it all the same.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    switcher = Switcher(folder, grace)
    _on_signals(switcher.tell_to_end)
    code = switcher.run()
    # Python puts back what would end it by the signal, and its exit code is to be the engine's.
    _on_signals(signal.SIG_IGN)
    return code


def _on_signals(handler: Any) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
