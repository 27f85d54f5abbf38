"""Starts vLLM with dummy weights and keeps what it says until it serves."""

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from specdecode_operator.calibration.engine_log import Given
from specdecode_operator.redaction import clip_start

DEFAULT_SHAPES: Final = ("64x8192", "256x8192", "1024x8192")
"""Sequences x batched tokens: what the persistent buffers and the activation peak grow with."""

_SERVES: Final = "Application startup complete"
_SHAPE: Final = re.compile(r"([1-9]\d{0,8})x([1-9]\d{0,8})")
_DEADLINE_S: Final = 1800.0
"""A cold start of a large model compiles for many minutes."""

_STOP_S: Final = 60.0
_SHOWN_CHARACTERS: Final = 2000
_POLL_S: Final = 0.5


@dataclass(frozen=True)
class EngineRun:
    """One start of an engine."""

    name: str
    command: tuple[str, ...]
    """Program and arguments."""

    max_num_seqs: int
    max_num_batched_tokens: int

    def settle(self, given: Given) -> Given:
        """Return what is given with the shape of this run."""
        return replace(given, max_num_seqs=self.max_num_seqs, max_num_batched_tokens=self.max_num_batched_tokens)

    def start(self) -> str:
        """Start it, wait until it serves, end it, and return its log.

        Raises
        ------
        RuntimeError
            With the end of its log, when it ends by itself or does not serve in time.
        """
        # The compile cache makes two starts differ: every run begins without one, as a new pod does.
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log"
            environment = os.environ | {"VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_CACHE_ROOT": folder}
            with log.open("wb") as stream:
                # A session of its own, so that its workers can be ended with it.
                process = subprocess.Popen(  # noqa: S603  the command is ours
                    self.command, stdout=stream, stderr=stream, env=environment, start_new_session=True
                )
            try:
                self._wait(process, log)
            finally:
                _end(process)
            return log.read_text(encoding="utf-8", errors="replace")

    def _wait(self, process: subprocess.Popen[bytes], log: Path) -> None:
        deadline_s = time.monotonic() + _DEADLINE_S
        while True:
            ended = process.poll() is not None
            text = log.read_text(encoding="utf-8", errors="replace")
            if _SERVES in text:
                return
            if ended or time.monotonic() > deadline_s:
                why = f"ended with {process.returncode}" if ended else f"did not serve within {_DEADLINE_S:.0f} s"
                raise RuntimeError(f"{self.name}: vLLM {why}:\n{clip_start(text, _SHOWN_CHARACTERS)}")
            time.sleep(_POLL_S)


def runs_of(
    model: str, draft: str | None, shapes: Sequence[str], num_speculative_tokens: int, given: Given
) -> list[EngineRun]:
    """Return the runs that measure a model: each shape without speculation, with ngram, and with the draft.

    Raises
    ------
    ValueError
        When vLLM is not installed or a shape cannot be read.
    """
    program = shutil.which("vllm")
    if program is None:
        raise ValueError("vllm is not installed here: pip install '.[engine]' in a clone, where the GPUs are")
    common = ["--load-format", "dummy", "--tensor-parallel-size", str(given.tensor or 1)]
    common += ["--max-model-len", str(given.max_model_len)] if given.max_model_len else []
    speculations: list[dict[str, str | int] | None] = [None, {"method": "ngram"}]
    if draft:
        speculations.append({"method": "draft_model", "model": draft})
    runs = []
    for sequences, tokens in map(_shape, shapes or DEFAULT_SHAPES):
        for speculation in speculations:
            command = [program, "serve", model, *common]
            command += ["--max-num-seqs", str(sequences), "--max-num-batched-tokens", str(tokens)]
            method = speculation["method"] if speculation else "none"
            if speculation:
                config = {**speculation, "num_speculative_tokens": num_speculative_tokens}
                command += ["--speculative-config", json.dumps(config)]
            runs.append(EngineRun(f"{method} {sequences}x{tokens}", tuple(command), sequences, tokens))
    return runs


def _shape(text: str) -> tuple[int, int]:
    found = _SHAPE.fullmatch(text)
    if not found:
        raise ValueError(f"--shape {text}: must be SEQUENCESxBATCHED_TOKENS, such as 256x8192")
    return int(found[1]), int(found[2])


def _end(process: subprocess.Popen[bytes]) -> None:
    """End an engine and its workers: gently, then not."""
    for number, patience_s in ((signal.SIGTERM, _STOP_S), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience_s)
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
    process.wait()
