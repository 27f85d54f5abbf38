"""Run the parts of the test suite in parallel: one computes while another waits for a cluster. `./just test` runs this.

    python -m tests.parts [PART...]    all parts if no part is named

Each part is a separate process, and a failed part does not end the others. At the end, the wall time of each part is
printed, and the CPU time of all its processes, including the processes in its clusters.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from devcluster.builds import binaries
from devcluster.host.errors import ClusterError
from devcluster.host.paths import REPOSITORY
from devcluster.images.engine_environment import install_engine_environment
from devcluster.install import prepare_images
from tests.support import browser, prometheus
from tests.support.kubernetes import MINOR

_DEADLINE_S = 75 * 60
"""For a part that hangs: before CI ends everything, and the part's output with it."""

_SUMMARY = re.compile(r"^=+ (.*) in [\d.]+s .*=+$", re.MULTILINE)
_COUNTED = re.compile(r"(\d+) (passed|failed|error|skipped)")
_interrupted = threading.Event()


def programs() -> None:
    """Build the programs of clusters but those for long tests, and fetch the sources that go with them."""
    wanted = (name for group in binaries.groups(MINOR) if not group.rarely for name in group.packages)
    binaries.find(*wanted, kubernetes=MINOR)
    binaries.kwok_stages()
    binaries.lws_sources()
    binaries.prometheus_operator_crds()
    binaries.gateway_api_crds()
    binaries.gateway_api_crds(oldest=True)
    binaries.inference_extension_crds()
    binaries.inference_extension_crds(oldest=True)


@dataclass(frozen=True)
class Part:
    """A command, and what must be there before it."""

    name: str
    command: tuple[str, ...]
    needs: tuple[Callable[[], object], ...] = ()


@dataclass(frozen=True)
class Outcome:
    """The result of a part's run."""

    part: Part
    status: int
    wall_s: float
    cpu_s: float
    output: str

    @property
    def counts(self) -> dict[str, int]:
        """Return how many tests passed, failed, were skipped, or ended in an error, as pytest says."""
        said = _SUMMARY.findall(self.output)
        return {word: int(number) for number, word in _COUNTED.findall(said[-1])} if said else {}

    @property
    def failure(self) -> str | None:
        """Return why this part fails the run; None where it does not."""
        if self.status:
            return f"{self.part.name}: exit status {self.status}"
        if self.counts and not self.counts.get("passed"):
            return f"{self.part.name}: no test has passed"
        return None


def _pytest(*paths: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "pytest", "-m", "not long", "--color=no", *paths)


def part_of(folder: str, *needs: Callable[[], object], without: Iterable[str] = ()) -> Part:
    """Return the part of one folder of tests, without some that run as another part."""
    ignored = (f"--ignore=tests/{folder}/{each}" for each in without)
    return Part(folder.rpartition("/")[2], _pytest(f"tests/{folder}", *ignored), needs)


_REPLAY = ("capture/report", "replay")
_DECISIONS = ("capture", "cli", "deployment")
_FAULTS = ("faults", "policy")
_CAPTURES = (
    "test_borrowing.py",
    "test_capture_arms.py",
    "test_capture_verbs.py",
    "test_captures.py",
    "test_draft_update.py",
    "test_live_captures.py",
    "test_model_cache.py",
    "test_model_reading.py",
    "test_refresh.py",
    "test_schedules.py",
    "test_trained_drafts.py",
    "test_trainings.py",
)
# Parts of their own, or one lane would take much longer than the others.
REPLAY = Part("replay", _pytest(*(f"tests/unit/{each}" for each in _REPLAY)), (browser.provide,))
DECISIONS = Part(
    "decisions", _pytest(*(f"tests/unit/{each}" for each in _DECISIONS), "--ignore=tests/unit/capture/report")
)
# Tests of the operator wait for a cluster most of the time, so half of them run in a lane of their own.
# Rights are checked on the API server of each session.
CAPTURES = Part(
    "captures", _pytest(*(f"tests/component/operator/{each}" for each in (*_CAPTURES, "test_rights.py"))), (programs,)
)
FAULTS = Part(
    "faults", _pytest(*(f"tests/component/operator/{each}" for each in (*_FAULTS, "test_rights.py"))), (programs,)
)

LANES = (
    (part_of("e2e/serving", programs, prepare_images), DECISIONS),
    (part_of("component/operator", programs, without=(*_FAULTS, *_CAPTURES)),),
    (CAPTURES,),
    (
        FAULTS,
        REPLAY,
        part_of("engine", install_engine_environment),  # late: its clients want a processor when they leave
    ),
    (
        part_of("e2e/fleet", programs, prepare_images),
        part_of("component/admission", programs, prometheus.provide),
    ),
    (
        Part("lint", (str(REPOSITORY / "just"), "lint")),
        Part("typing", (str(REPOSITORY / "just"), "typing")),
        part_of("unit", without=(*_REPLAY, *_DECISIONS)),
        part_of("devcluster", programs),  # when no other cluster comes: it looks for what one of its own has left
    ),
)
"""The parts of a lane run one after another. Lanes run side by side: some compute while others wait for clusters."""
NAMES = tuple(part.name for lane in LANES for part in lane)


def prepare(parts: Iterable[Part]) -> Outcome:
    """Build and install what the parts need, before they run side by side: on an empty machine for a long time."""
    started, used_before = time.monotonic(), os.times()
    for need in dict.fromkeys(need for part in parts for need in part.needs):
        try:
            need()
        # The part that needs it fails by itself, or skips what it cannot do.
        except (ClusterError, OSError, subprocess.SubprocessError) as error:
            say(f"preparation: {error}")
    cpu_s = sum(os.times()[:4]) - sum(used_before[:4])
    return Outcome(Part("preparation", ()), 0, time.monotonic() - started, cpu_s, "")


def _environment() -> dict[str, str]:
    """Return the environment of a part, in which Python writes bytecode.

    Otherwise, pytest rewrites the assertions in each run, which takes 5 s in the part `unit`.
    """
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def run(part: Part, folder: Path) -> Outcome:
    """Run a part to its end; its output is in the folder while it runs."""
    log, used = folder / f"{part.name}.log", folder / f"{part.name}.cpu"
    say(f"{part.name} … ({log})")
    started = time.monotonic()
    with log.open("w") as output:
        command = [sys.executable, "-m", "tests.support.reaper", str(used), *part.command]
        process = subprocess.Popen(command, env=_environment(), stdout=output, stderr=subprocess.STDOUT)
        try:
            status = process.wait(_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            status = process.wait() or 1
    wall_s, cpu_s = time.monotonic() - started, float(used.read_text()) if used.exists() else 0.0
    outcome = Outcome(part, status, wall_s, cpu_s, log.read_text(errors="replace"))
    say(f"\n{f' {part.name} ':-^80}\n{outcome.output.rstrip()}\n{outcome.failure or ''}")
    return outcome


def run_lanes(lanes: list[list[Part]]) -> list[Outcome]:
    """Run the lanes beside each other, the parts of each one after another; none begins after an interrupt."""
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="specdecode-test-") as folder, ThreadPoolExecutor(len(lanes)) as pool:

        def run_lane(lane: list[Part]) -> list[Outcome]:
            return [run(part, Path(folder)) for part in lane if not _interrupted.is_set()]

        running = [pool.submit(run_lane, lane) for lane in lanes]
        try:
            for each in running:
                outcomes += each.result()
        except KeyboardInterrupt:
            _interrupted.set()
            say("interrupted: clusters are removed …")
            raise
    return outcomes


def say(text: str) -> None:
    """Print at once: the output may be a file that somebody follows."""
    print(text, flush=True)  # noqa: T201  its purpose


def report(outcomes: list[Outcome]) -> int:
    """Print the table, what failed, and a line with the sums; return the exit status."""
    say(f"\n{'part':<12} {'tests':>6} {'wall s':>8} {'CPU s':>8}")
    for each in outcomes:
        count = sum(each.counts.values()) or ""
        say(f"{each.part.name:<12} {count:>6} {each.wall_s:>8.0f} {each.cpu_s:>8.0f}")
    failures = [each.failure for each in outcomes if each.failure]
    for failure in failures:
        say(f"FAILED {failure}")
    passed, failed, errors, skipped = (
        sum(each.counts.get(word, 0) for each in outcomes) for word in ("passed", "failed", "error", "skipped")
    )
    say(f"{passed} passed, {failed + errors} failed, {skipped} skipped")
    return 1 if failures else 0


def main() -> int:
    """Run the parts that are named, or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.parts", description=__doc__)
    parser.add_argument("part", nargs="*", help=f"one or more of: {', '.join(NAMES)}")
    wanted = parser.parse_args().part or NAMES
    if unknown := set(wanted) - set(NAMES):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are: {', '.join(NAMES)}")
    lanes = [[part for part in lane if part.name in wanted] for lane in LANES]
    try:
        return report([prepare(part for lane in lanes for part in lane), *run_lanes(lanes)])
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
