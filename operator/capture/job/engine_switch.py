"""The engine's container as the load generator has it where there are several arms: one engine after the other."""

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from specdecode_operator.capture.files.errors import CaptureError
from specdecode_operator.capture.recorder.switcher import ENDED, ORDER_FILE, RUNNING, STATE_FILE, STOPPED

ANSWER_S: Final = 180.0
"""How long the switcher may take to follow an order: it is there when its container has started, and an engine that
does not end when it is told is killed after a minute and a half."""

_POLL_S: Final = 0.1
_LARGEST_STATE_BYTES: Final = 4096


class State(Struct, frozen=True):
    """What became of the last order."""

    number: Annotated[int, Meta(ge=0)]
    state: Literal["running", "stopped", "ended"]
    exit_code: int | None = None  # of an engine that ended; null where nobody knows


class EngineSwitch:
    """Has engines started and stopped, through files that two containers share."""

    def __init__(self, folder: Path, answer_s: float = ANSWER_S) -> None:
        self._folder = folder
        self._answer_s = answer_s
        state = self._state()
        self._number = state.number if state is not None else 0

    async def start(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Start an engine, as soon as nothing is left of the one before.

        Raises
        ------
        CaptureError
            When it cannot be started.
        """
        await self._order(list(command), dict(env), RUNNING)

    async def stop(self) -> None:
        """Have the engine end, and return when nothing is left of it.

        Raises
        ------
        CaptureError
            When nobody followed the order.
        """
        await self._order(None, {}, STOPPED)

    async def wait_until_ended(self) -> str:
        """Return how the engine ended, when it did without being told."""
        while True:
            # In a thread: the schedule of the load must not wait for a file.
            state = await asyncio.to_thread(self._state)
            if state is not None and state.state == ENDED:
                return _how(state)
            await asyncio.sleep(_POLL_S)

    async def _order(self, command: list[str] | None, env: dict[str, str], expected: str) -> None:
        self._number += 1
        part = self._folder / f"{ORDER_FILE}.part"
        part.write_bytes(msgspec.json.encode({"number": self._number, "command": command, "env": env}))
        part.chmod(0o644)  # the engine's container may have another user
        part.replace(self._folder / ORDER_FILE)
        until_s = time.monotonic() + self._answer_s
        while (state := self._state()) is None or state.number < self._number:
            if state is not None and state.state == ENDED:
                raise _exited(state)
            if time.monotonic() >= until_s:
                raise CaptureError(
                    "EngineNotReady",
                    f"the engine's container did not follow an order within {self._answer_s:g} s: see its log; its"
                    " image must have python3",
                )
            await asyncio.sleep(_POLL_S)
        if state.state != expected:
            raise _exited(state)

    def _state(self) -> State | None:
        try:
            opened = os.open(self._folder / STATE_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:  # a link, which is not followed
            raise CaptureError("InternalError", f"{STATE_FILE} of the engine's container: {error.strerror}") from error
        try:
            with os.fdopen(opened, "rb") as stream:
                return msgspec.json.decode(stream.read(_LARGEST_STATE_BYTES), type=State)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise CaptureError("InternalError", f"{STATE_FILE} of the engine's container: {error}") from error


def _exited(state: State) -> CaptureError:
    return CaptureError("EngineExited", f"{_how(state)}: see its log")


def _how(state: State) -> str:
    code = "" if state.exit_code is None else f" with exit code {state.exit_code}"
    return f"the engine ended{code}, and nobody had told it to"
