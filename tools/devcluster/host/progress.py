"""What the tools say while they work: what they do, why, and for how long."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

QUIET_S = 2.0
"""A step shorter than this is not worth a line about its time."""
REPORT_EVERY_S = 15.0
"""How often a long step reports where the output is a file, not a terminal."""

_running: list[str] = []
"""Steps of all threads in the order of their start."""
_announced = ""


def say(text: str) -> None:
    """Print one line for the person at the keyboard (standard error: standard output is for data)."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def step(text: str) -> Iterator[None]:
    """Announce a step, show the elapsed time while it runs, and say how long it took."""
    global _announced  # noqa: PLW0603
    say(f"{text} …")
    _announced = text
    _running.append(text)
    started = time.monotonic()
    finished = threading.Event()
    ticker = threading.Thread(target=_tick, args=(text, started, finished), daemon=True)
    ticker.start()
    try:
        yield
    finally:
        finished.set()
        ticker.join()
        _running.remove(text)
    if (elapsed_s := time.monotonic() - started) >= QUIET_S:
        say(f"{' ' if _announced == text else f'{text}:'} done in {elapsed_s:.0f} s")


def _tick(text: str, started: float, finished: threading.Event) -> None:
    on_terminal = sys.stderr.isatty()
    shown = False
    while not finished.wait(1.0 if on_terminal else REPORT_EVERY_S):
        elapsed_s = time.monotonic() - started
        if on_terminal:
            if _running[-1] != text:
                continue
            print(f"\r  {elapsed_s:.0f} s", end="", file=sys.stderr, flush=True)
            shown = True
        else:
            say(f"  {text}: {elapsed_s:.0f} s")
    if shown:
        print("\r", end="", file=sys.stderr, flush=True)
