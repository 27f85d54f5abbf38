"""Measures the time until a standby acts after the leader is killed or terminated, with two replicas.

An object is changed when the leader gets the signal. The measurement ends when the child matches the change. Signals
are sent at random moments between two renewals of the Lease.
"""

import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Final

from bench.figures import Bound, Figure, at_most
from bench.operator.process_use import cpu_s, memory
from bench.operator.stand import Stand, stand
from bench.operator.subjects import Operator
from bench.operator.watching import Name
from tests.support.operator_process import NAMESPACE, SERVICE_ACCOUNT, OperatorProcess

OBJECTS: Final = 50
TIMES: Final = 10
IDLE_S: Final = 30.0
RENEWED_EACH_S: Final = 1.0
MOST_FAILOVER_S: Final = 10.0
MOST_HAND_OVER_S: Final = 3.0

_LOOK_S: Final = 0.01
_LOOK_AT_ALL_S: Final = 5.0
_MB: Final = 1_000_000
_CALM_S: Final = 3.0
_CALM_AFTER: Final = 20
_BUSY: Final = 0.05
"""Most CPU, in cores, of a standby that only watches the Lease."""


class Pair:
    """A leader and a standby, with many objects."""

    def __init__(self, cluster: Stand) -> None:
        self._stand, self._kind = cluster, Operator(cluster)
        kubeconfig, folder = cluster.operator_kubeconfig, cluster.folder
        names = ("replica-1", "replica-2")
        self._replicas = {name: OperatorProcess(kubeconfig, folder / f"{name}.log", name) for name in names}
        self._wanted: dict[Name, int] = {}
        self.leader: OperatorProcess
        self.standby: OperatorProcess

    def start(self, objects: int) -> None:
        """Start both replicas, and wait until all objects have their children."""
        for name in (names := Operator.names(objects)):
            self._kind.create(name)
        self._wanted = dict.fromkeys(names, 1)
        for each in self._replicas.values():
            each.start()
        while len(self._stand.api.objects("", "deployments", Operator.selector)) < objects:
            time.sleep(_LOOK_AT_ALL_S)
        self.find_leader()
        self._wait_until_synced()

    def stop(self) -> None:
        """Stop both replicas."""
        for each in self._replicas.values():
            each.kill()

    def find_leader(self) -> None:
        """Read from the Lease which replica is the leader."""
        lease = self._stand.api.object(NAMESPACE, "leases", SERVICE_ACCOUNT)
        self.leader = self._replicas[lease["spec"]["holderIdentity"]]
        (self.standby,) = (each for each in self._replicas.values() if each is not self.leader)

    def failover_s(self, number: signal.Signals, draw: random.Random) -> float:
        """Send the leader a signal, change an object, and return the time until the change is applied."""
        name = draw.choice([*self._wanted])
        time.sleep(draw.uniform(0, RENEWED_EACH_S))
        begun_s = time.monotonic()
        os.kill(self.leader.pid, number)
        self._wanted[name] += 1
        self._stand.api.patch(name[0], "specdecodedeployments", name[1], {"spec": {"replicas": self._wanted[name]}})
        while self._stand.api.object(name[0], "deployments", name[1])["spec"]["replicas"] != self._wanted[name]:
            time.sleep(_LOOK_S)
        taken_s = time.monotonic() - begun_s
        self.leader.stop()
        self.leader.start()
        self.find_leader()
        self._wait_until_synced()
        return taken_s

    def _wait_until_synced(self) -> None:
        """Wait until the CPU of the standby shows that its cache is complete."""
        for _ in range(_CALM_AFTER):
            before_s = cpu_s(self.standby.pid)
            time.sleep(_CALM_S)
            if cpu_s(self.standby.pid) - before_s < _BUSY * _CALM_S:
                return


def figures() -> Iterator[Figure]:
    """Yield the figures."""
    # Times of the signals, the same in each run; not for secrets.
    draw = random.Random(18)  # noqa: S311
    with stand(f"bench-failover-{os.getpid()}", OBJECTS) as cluster:
        pair = Pair(cluster)
        try:
            pair.start(OBJECTS)
            print(f"  {OBJECTS} objects have their children", file=sys.stderr, flush=True)
            yield from _idle(pair)
            yield from _times("killed", pair, signal.SIGKILL, draw, at_most(MOST_FAILOVER_S))
            yield from _times("told to end", pair, signal.SIGTERM, draw, at_most(MOST_HAND_OVER_S))
        finally:
            pair.stop()


def _times(how: str, pair: Pair, number: signal.Signals, draw: random.Random, most: Bound) -> Iterator[Figure]:
    times = []
    for _ in range(TIMES):
        times.append(pair.failover_s(number, draw))
        print(f"  {how}: {times[-1]:.2f} s", file=sys.stderr, flush=True)
    remark = f"{TIMES} times, {OBJECTS} objects; from the signal until the standby has applied a change"
    yield Figure(f"replica {how}, a change is acted on, median", statistics.median(times), "s", most, remark)
    yield Figure(f"replica {how}, a change is acted on, worst", max(times), "s", most, remark)


def _idle(pair: Pair) -> Iterator[Figure]:
    """Yield CPU and memory of both replicas while engines start and are polled."""
    replicas = {"works": pair.leader, "waits": pair.standby}
    before = {what: cpu_s(each.pid) for what, each in replicas.items()}
    time.sleep(IDLE_S)
    for what, each in replicas.items():
        share = 100 * (cpu_s(each.pid) - before[what]) / IDLE_S
        remark = f"{OBJECTS} objects, first {IDLE_S:.0f} s after all have their children"
        yield Figure(f"replica that {what}, CPU", share, "% of a core", None, remark)
        yield Figure(f"replica that {what}, memory", memory(each.pid).now_bytes / _MB, "MB", None, remark)
