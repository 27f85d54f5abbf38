"""A running engine_oracle.py, and questions to it."""

import json
import os
import select
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from threading import Timer
from types import TracebackType
from typing import Any, Self

from tests.engine.engine_process import DEADLINE_S, QUIET, Engine


@dataclass(frozen=True)
class Answer:
    """What vLLM said: a value, or the error in which the question ended."""

    value: Any
    error: str | None

    @property
    def ok(self) -> bool:
        """Whether there is a value."""
        return self.error is None


class Pending:
    """A question whose answer may not be there yet."""

    def __init__(self, oracle: "Oracle", number: int, asked: str) -> None:
        self._oracle, self._number, self._asked = oracle, number, asked

    def get(self) -> Answer:
        """Return the answer; fail where the engine ends or says nothing."""
        return self._oracle.answer(self._number, self._asked)


class Copy:
    """A script that runs in a copy of an oracle's process."""

    def __init__(self, oracle: "Oracle", begun: Pending, log: Path) -> None:
        self._oracle, self._begun, self._log = oracle, begun, log

    def wait(self) -> str:
        """Return what it wrote, once it has ended; fail with its last words where it failed."""
        number = self._begun.get().value
        with suppress(ProcessLookupError):
            _wait_for_end(number)
        status = self._oracle.ask("ended", number).value
        said = self._log.read_text(errors="replace")
        assert status == 0, f"ended with {status}:\n{said[-4000:]}"
        return said


def _wait_for_end(process: int) -> None:
    descriptor = os.pidfd_open(process)
    try:
        ended, _, _ = select.select([descriptor], [], [], DEADLINE_S)
        assert ended, f"not within {DEADLINE_S} s"
    finally:
        os.close(descriptor)


class Oracle:
    """A vLLM that answers questions: see the functions of engine_oracle.py."""

    def __init__(self, engine: Engine, *, h100: bool = False, modules: Sequence[str] = ()) -> None:
        """Start it.

        Parameters
        ----------
        h100
            Whether it is to believe that it runs on H100s.
        modules
            What else it imports, for copies of it.
        """
        imported = ", ".join([*(["fake_h100"] if h100 else []), "engine_oracle", *modules])
        # What is imported is no garbage, here and in the copies.
        script = f"import gc; gc.disable(); import {imported}; gc.freeze(); gc.enable(); engine_oracle.main()"
        self._log = TemporaryFile()  # noqa: SIM115 (closed with the process)
        answers, written_by_it = os.pipe()
        self._process = subprocess.Popen(
            [engine.python, "-c", script, str(written_by_it)],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            env=os.environ | QUIET | {"PYTHONPATH": engine.path},
            pass_fds=[written_by_it],
            text=True,
            start_new_session=True,
        )
        os.close(written_by_it)
        self._lines = os.fdopen(answers)
        self._asked = self._answered = 0
        self._answers: dict[int, Answer] = {}

    def ask(self, question: str, *arguments: Any) -> Answer:
        """Return the answer to a question; fail where the engine ends or says nothing."""
        return self.post(question, *arguments).get()

    def post(self, question: str, *arguments: Any) -> Pending:
        """Ask a question, and do not wait for the answer."""
        assert self._process.stdin
        with suppress(BrokenPipeError):  # its end is told to who waits for the answer
            self._process.stdin.write(json.dumps([question, *arguments]) + "\n")
            self._process.stdin.flush()
        self._asked += 1
        return Pending(self, self._asked, f"{question}{arguments}")

    def answer(self, number: int, asked: str) -> Answer:
        """Return the answer to the question of a number."""
        too_long = Timer(DEADLINE_S, self._process.kill)
        too_long.start()
        try:
            while self._answered < number:
                line = self._lines.readline()
                if not line:
                    raise AssertionError(f"no answer to {asked}:\n{self._last_words()}")
                found = json.loads(line)
                self._answered += 1
                self._answers[self._answered] = Answer(found.get("value"), found.get("error"))
        finally:
            too_long.cancel()
        return self._answers.pop(number)

    def begin(
        self,
        script: Path | str,
        folder: Path,
        *arguments: object,
        given: str = "",
        packages: Sequence[Path] = (),
        **environment: str,
    ) -> Copy:
        """Run a script, or a module's main function, in a copy of it, which need not import vLLM again."""
        folder.mkdir(parents=True, exist_ok=True)
        text, log = folder / "given", folder / "log"
        text.write_text(given, encoding="utf-8")
        words, folders = ([str(each) for each in all_of_them] for all_of_them in (arguments, packages))
        files = {"given": str(text), "log": str(log)}
        begun = self.post("begin", str(script), words, files, environment, folders)
        return Copy(self, begun, log)

    def _last_words(self) -> str:
        self._process.wait()
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-4000:]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._lines.close()
        self._log.close()
