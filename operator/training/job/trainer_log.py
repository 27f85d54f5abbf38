"""Parse the output of speculators. It may quote rows, so only numbers and code locations leave this module."""

import json
import math
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|nan|inf)"
_PAIR = re.compile(rf"(?:^|[\s,])([A-Za-z][\w/]{{0,63}})=({_NUMBER})(?=$|[\s,])", re.IGNORECASE)
_EPOCH_DONE = re.compile(r"Training epoch (\d{1,6})/(\d{1,6}) completed")
_SAVED = re.compile(r"Checkpoint saved to ")
_LONGEST_LINE = 16_384
_FRAME = re.compile(r'File "([^"\n]{1,1024})", line (\d{1,7})')
_EXCEPTION = re.compile(
    r"^[^\w\n]*((?:[A-Za-z_]\w{0,63}\.){0,8}[A-Z]\w{0,63}(?:Error|Exception|Interrupt))(?=:|\s*$)", re.MULTILINE
)
_DISK_FULL = re.compile(r"No space left on device|Errno 28\b|Disk quota exceeded|SafetensorError.{0,80}StorageFull")
_OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|CUDA out of memory")
_LOSSES = ("train/loss", "train/loss_sum")
_VALIDATION_LOSS = "val/loss_epoch"


@dataclass
class Progress:
    """Progress of a training, from the lines of its log."""

    epochs: int
    clock: Callable[[], float] = time.monotonic
    step: int | None = None
    loss: float | None = None
    validation_loss: float | None = None
    done: int = 0  # Epochs
    saved: bool = False  # A checkpoint since the last call of `take_saved`
    diverged_at: int | None = None  # Step with a loss that is not a number
    ends_epoch: bool = False  # The last line reported the end of an epoch, or its validation
    _first: tuple[int, float] | None = field(default=None, repr=False)  # Epochs done before this attempt, and when
    _started_s: float = field(default=-1.0, repr=False)

    def feed(self, line: str) -> dict[str, Any] | None:
        """Parse one line; return the progress that it reports, if any."""
        if self._started_s < 0:
            self._started_s = self.clock()
        self.ends_epoch = False
        if len(line) > _LONGEST_LINE:
            return None
        if found := _EPOCH_DONE.search(line):
            done = int(found[1])
            if self._first is None:
                self._first = (done - 1, self._started_s)
            self.done, self.ends_epoch = max(self.done, done), True
            return self._report()
        if _SAVED.search(line):
            self.saved = True
        figures = {name: float(value) for name, value in _PAIR.findall(line)}
        if _VALIDATION_LOSS in figures:
            self.validation_loss, self.ends_epoch = figures[_VALIDATION_LOSS], True
            if not math.isfinite(self.validation_loss):
                self.diverged_at = self.step or 0
            return self._report()
        loss = next((figures[name] for name in _LOSSES if name in figures), None)
        if loss is None or "global_step" not in figures or not math.isfinite(figures["global_step"]):
            return None
        self.step, self.loss = int(figures["global_step"]), loss
        if not math.isfinite(loss):
            self.diverged_at = self.step
        return self._report()

    def take_saved(self) -> bool:
        """Return whether a checkpoint was saved since the last call."""
        saved, self.saved = self.saved, False
        return saved

    def _report(self) -> dict[str, Any]:
        found = {
            "step": self.step,
            "epochsDone": self.done,
            "epochs": self.epochs,
            "loss": _finite(self.loss),
            "validationLoss": _finite(self.validation_loss),
            "etaSeconds": self._eta_s(),
        }
        return {name: value for name, value in found.items() if value is not None}

    def _eta_s(self) -> int | None:
        """Estimate the remaining time from the average time of an epoch in this attempt."""
        if self._first is None:
            return None
        before, since_s = self._first
        if self.done <= before:
            return None
        epoch_s = (self.clock() - since_s) / (self.done - before)
        return max(0, round(epoch_s * (self.epochs - self.done)))


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 5)


def progress_line(report: dict[str, Any]) -> str:
    """Return a line for the container's log."""
    return json.dumps({"progress": report}, sort_keys=True)


def is_disk_full(text: str) -> bool:
    """Return whether a program's output reports a full volume."""
    return _DISK_FULL.search(text) is not None


def how_it_ended(code: int, text: str) -> str:
    """Describe how a program failed by signal or exit code, exception type and code location; never quote its text."""
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = str(-code)
        advice = ", probably out of memory" if -code == signal.SIGKILL else ""
        return f"killed by {name}{advice}"
    kinds = _EXCEPTION.findall(text)
    kind = kinds[-1].rpartition(".")[2] if kinds else None
    frames = _FRAME.findall(text)
    place = f" at {_file_name(frames[-1][0])}:{frames[-1][1]}" if frames else ""
    memory = ", out of GPU memory" if _OUT_OF_MEMORY.search(text) else ""
    return f"exit code {code}{f', {kind}{place}' if kind else ''}{memory}"


def _file_name(path: str) -> str:
    name = path.rpartition("/")[2]
    return name if re.fullmatch(r"[\w.-]{1,64}", name) else "a file"
