"""Hunts: rounds until the time is over or something is found, which is then repeated with ever less."""

import itertools
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from hunt import findings
from hunt.findings import Beat
from hunt.oracles import Finding, judge
from hunt.records import Record
from hunt.rounds import Round
from hunt.shrink import shrink
from hunt.stage import Stage
from hunt.states import count_states
from hunt.steps import TOUR_FAULTS, tour, wander
from hunt.steps import Sequence as Steps

_WIDTH: Final = 10
"""Namespaces side by side."""

_ATTEMPTS: Final = 8
"""Rounds that shrinking a finding may take."""


@dataclass
class Tried:
    """What a hunt did so far."""

    rounds: int = 0
    sequences: int = 0
    states: set[str] = field(default_factory=set)
    transitions: set[tuple[str, str]] = field(default_factory=set)
    steps: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    calls: int = 0

    def add(self, record: Record) -> None:
        """Count a round."""
        self.rounds += 1
        self.sequences += len(record.lives)
        self.faults.update(fault for fault in record.faults if fault != "none")
        for life in record.lives:
            states = [str(step.state) for step in life.sequence.steps if step.state is not None]
            self.states |= set(states)
            self.transitions |= set(itertools.pairwise(states))
            self.steps.update(step.kind for step in life.sequence.steps)
            self.refused += sum(bool(moment.refused) for moment in life.moments)
            self.calls += sum(len(moment.calls) for moment in life.moments) + len(life.calls)

    def __str__(self) -> str:
        return (
            f"{self.rounds} rounds, {self.sequences} sequences, {len(self.states)} states of the {count_states()} that"
            f" are one change from an example, {len(self.transitions)} transitions, {self.refused} refused by the API"
            f" server, {self.calls} calls of the operator\nsteps: {_counted(self.steps)}\n"
            f"with the operator: {_counted(self.faults)}"
        )


class Hunt:
    """Rounds with one seed."""

    def __init__(self, stage: Stage, seed: int, finding_file: Path, without: frozenset[str] = frozenset()) -> None:
        self._stage, self._seed, self._file, self._without = stage, seed, finding_file, without
        self._numbers = itertools.count()
        self._token = f"{int(time.time()) % 100_000:05d}"
        self.tried = Tried()

    def run(self, minutes: float) -> list[Finding]:
        """Return what was found first, or nothing when the time is over; one round there is at least."""
        end = time.monotonic() + 60 * minutes
        for number in itertools.count():
            sequences, faults = (tour(self._seed), TOUR_FAULTS) if not number else wander(self._seed + number, _WIDTH)
            record = self.round(sequences, faults)
            if found := judge(record, self._without):
                self._tell(record, found)
                return found
            if time.monotonic() > end:
                break
        return []

    def repeat(self, beats: Sequence[Beat]) -> list[Finding]:
        """Return what a sequence alone shows."""
        sequence = Steps(tuple(beat.step for beat in beats))
        return judge(self.round([sequence], tuple(beat.fault for beat in beats)), self._without)

    def round(self, sequences: list[Steps], faults: tuple[str, ...]) -> Record:
        """Run one round and count it."""
        print(f"hunt: round {self.tried.rounds + 1}, {len(sequences)} sequences …", file=sys.stderr, flush=True)
        record = Round(self._stage, f"{self._token}-{next(self._numbers)}", sequences, faults).run()
        self.tried.add(record)
        return record

    def _tell(self, record: Record, found: list[Finding]) -> None:
        """Shrink the first finding, and print what repeats it."""
        for finding in found:
            print(finding)
        first = found[0]
        lives = [life for life in record.lives if life.namespace == first.where] or record.lives[:1]
        faults = itertools.chain(record.faults, itertools.repeat("none"))
        beats = [Beat(step, fault) for step, fault in zip(lives[0].sequence.steps, faults, strict=False)]
        print(f"\nshrinking {len(beats)} beats, {_ATTEMPTS} rounds at most …", flush=True)
        beats = list(shrink(beats, lambda part: self._shows(part, first.oracle), _ATTEMPTS))
        findings.write(self._file, beats, str(first))
        print(findings.as_manifests(beats))
        print(f"seed {self._seed}; again: ./just hunt --repeat {self._file}")

    def _shows(self, beats: Sequence[Beat], oracle: str) -> bool:
        return any(finding.oracle == oracle for finding in self.repeat(beats))


def _counted(counter: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counter.most_common()) or "none"
