"""Runs a controller with many objects through the phases of their life, and measures the cost of each."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from bench.operator import histogram
from bench.operator.audit_counts import AuditCounts, writes
from bench.operator.process_use import Memory, cpu_of_all_s, machine_cpu_s, memory
from bench.operator.slowest import Look, looks
from bench.operator.subjects import Operator, Subject
from bench.operator.watching import Name, NotInTimeError, Seen, Watched
from devcluster.cluster.control_plane import audit_log
from devcluster.host import processes
from devcluster.host.errors import ClusterError
from tests.support.waiting import eventually

_AT_ONCE: Final = 4
"""Parallel requests of the bench."""
_QUIET_S: Final = 20.0
"""Longer than the resync period of the operator, so that pending writes would happen."""
SETTLED_QUIET_S: Final = 80.0
"""The same after engines start. The operator writes their first figures a minute after the first answer."""
_LOOK_S: Final = 0.5
_REACTIONS: Final = 10
_BETWEEN_CHANGES_S: Final = 5.0
"""Time without writes of a controller before the next change. A controller writes when a new pod becomes ready."""
_DURATION: Final = "specdecode_reconcile_duration_seconds"


@dataclass(frozen=True)
class Cost:
    """Resources used between two moments."""

    wall_s: float
    cpu_s: float
    calls: Counter[str]
    wire_bytes: int
    etcd_writes: int
    reconciles: dict[float, float]
    """Buckets of the operator's histogram; empty for the peer."""
    server_s: float
    """Time that the API server took for the calls."""
    looks: list[Look]
    """Reconciles in the operator's log; empty for the peer."""
    others_s: float
    """CPU time of all processes outside the bench and its cluster."""

    @property
    def others_cores(self) -> float:
        """Average number of cores that other processes used. More load makes all times longer."""
        return max(0.0, self.others_s / self.wall_s)


class Measured:
    """A controller, its objects, and the counters that are read before and after each phase."""

    def __init__(self, subject: Subject, objects: int, say: Callable[[str], None]) -> None:
        self.subject, self.say = subject, say
        self.names = subject.names(objects)
        self.deadline_s = 300.0 + 2 * objects
        kubeconfig = subject.stand.cluster.kubeconfig
        self.children = {kind: Watched(kubeconfig, kind, subject.selector) for kind in subject.children}
        self.parents = Watched(kubeconfig, subject.kind)
        self._audit = AuditCounts(audit_log(subject.stand.cluster.state), subject.user)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the controller during the block."""
        try:
            self.subject.start()
            yield
        finally:
            self.subject.stop()
            for watched in (self.parents, *self.children.values()):
                watched.end()
            self._audit.close()

    @contextmanager
    def costing(self, costs: dict[str, Cost], phase: str) -> Iterator[None]:
        """Store the cost of the block under the name of the phase."""
        pids, before = self.subject.pids, self._moment()
        yield
        after, is_same = self._moment(), self.subject.pids == pids
        costs[phase] = Cost(
            after.wall_s - before.wall_s,
            after.cpu_s - before.cpu_s * is_same,
            after.calls - before.calls,
            after.wire_bytes - before.wire_bytes,
            after.etcd_writes - before.etcd_writes,
            histogram.since(before.reconciles if is_same else {}, after.reconciles),
            after.server_s - before.server_s,
            after.looks[len(before.looks) :],
            after.others_s - before.others_s,
        )
        self.say(f"{phase}: {costs[phase].wall_s:.1f} s, {costs[phase].cpu_s:.1f} s CPU")

    def memory(self) -> Memory:
        """Return the current and peak memory of the controller process with the highest peak."""
        return max(map(memory, self.subject.pids), key=lambda each: each.peak_bytes)

    def create(self) -> None:
        """Create all objects, and wait for their children."""
        self.for_each(self.subject.create, self.names)
        for kind, each in self.subject.children.items():
            wanted = each * len(self.names)
            self._wait(self.children[kind], lambda seen, n=wanted: len(seen) >= n, f"all {kind} exist")  # type: ignore[misc]

    def wait_until_ready(self) -> int:
        """Wait until all objects are Ready or the deadline has passed, and return the number of Ready objects."""
        with suppress(NotInTimeError):
            self._wait(
                self.parents,
                lambda seen: len(seen) == len(self.names) and all(map(_is_ready, seen.values())),
                "all are Ready",
            )
        return self.parents.count(_is_ready)

    def rest(self, quiet_s: float = _QUIET_S) -> None:
        """Wait until the controller has written only its Lease for a while."""
        written, since_s = writes(self._audit.read()), time.monotonic()
        end_s = since_s + self.deadline_s
        while time.monotonic() - since_s < quiet_s:
            time.sleep(_LOOK_S)
            self.subject.check()
            now = writes(self._audit.read())
            if now != written:
                written, since_s = now, time.monotonic()
            if time.monotonic() > end_s:
                raise NotInTimeError(f"{self.subject.title} does not become idle")

    def reactions_s(self) -> list[float]:
        """Change objects one by one, each at rest, and return the time until each change reached its workload."""
        times_s = []
        for name in _spread(self.names, _REACTIONS):
            self.rest(_BETWEEN_CHANGES_S)
            times_s.append(self._reaction_s(name))
        return times_s

    def restart(self) -> float:
        """Restart the controller with pending changes, and return the time until all are applied."""
        subject, changed = self.subject, _spread(self.names[1:], 3)
        before = self.children[subject.workload].generations()
        subject.stop()
        if subject.takes_changes_while_down:
            for name in changed:
                subject.change(name)
        started_s = time.monotonic()
        subject.start()
        if not subject.takes_changes_while_down:
            for name in changed:
                eventually(lambda each=name: self._is_changed(each), f"{name} can be changed")  # type: ignore[misc]
        return max(self._moved_s(name, before[name]) for name in changed) - started_s

    def update(self, change: Callable[[Name], None]) -> None:
        """Change all objects, and wait until the change has reached all workloads."""
        before = self.children[self.subject.workload].generations()
        self.for_each(change, self.names)
        self._wait(
            self.children[self.subject.workload],
            lambda seen: all(name in seen and seen[name].generation > before[name] for name in self.names),
            "all are updated",
        )

    def delete(self) -> None:
        """Delete all objects, and wait until their children are gone."""
        self.subject.delete_all()
        for kind, watched in self.children.items():
            self._wait(watched, lambda seen: not seen, f"all {kind} are gone")

    def for_each(self, act: Callable[[Name], None], names: Iterable[Name]) -> None:
        """Act on objects in parallel."""
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for _ in pool.map(act, names):
                pass

    def _wait(self, watched: Watched, reached: Callable[[dict[Name, Seen]], bool], what: str) -> None:
        watched.wait(reached, what, self.deadline_s, self.subject.check)

    def _moment(self) -> Cost:
        stand, subject = self.subject.stand, self.subject
        is_operator = isinstance(subject, Operator)
        labels = {"kind": "SpecDecodeDeployment"}
        return Cost(
            time.monotonic(),
            cpu_of_all_s(subject.pids),
            self._audit.read(),
            stand.operator_bytes() if is_operator else 0,
            stand.etcd_writes(),
            histogram.buckets(subject.metrics(), _DURATION, labels) if isinstance(subject, Operator) else {},
            self._audit.server_s,
            looks(subject.log()) if is_operator else [],
            machine_cpu_s() - cpu_of_all_s(processes.marked(stand.cluster.state) | {*subject.pids, os.getpid()}),
        )

    def _reaction_s(self, name: Name) -> float:
        before = self.children[self.subject.workload].generations()[name]
        started_s = time.monotonic()
        self.subject.change(name)
        return self._moved_s(name, before) - started_s

    def _moved_s(self, name: Name, before: int) -> float:
        """Return when the watch first showed a new spec of an object's workload."""
        workloads = self.children[self.subject.workload]
        self._wait(workloads, lambda seen: seen[name].generation > before, f"{name} is applied")
        return workloads.seen(name).at_s

    def _is_changed(self, name: Name) -> bool:
        try:
            self.subject.change(name)
        except ClusterError:  # its webhook does not answer yet
            return False
        return True


def _is_ready(seen: Seen) -> bool:
    ready, _, wanted = str(seen.cells[1]).partition("/")
    return ready == wanted != "0"


def _spread(names: list[Name], count: int) -> list[Name]:
    """Return names at equal distances, from the first to the last."""
    count = min(count, len(names))
    last = len(names) - 1
    return [names[round(place * last / max(1, count - 1))] for place in range(count)]
