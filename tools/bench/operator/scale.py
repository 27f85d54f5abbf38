"""Measures the operator with many objects, and LeaderWorkerSet on the same API server.

    ./just bench-operator [--objects 100,1000] [--alone] [--operators 2] [--json FILE]

The API server is real. KWOK simulates nodes and pods, and the address of each pod answers like an engine. The operator
has its own service account, rights and Lease. Calls are counted in the API server's audit log, and bytes by the kernel.
LeaderWorkerSet runs with its webhooks, and creates a leader and a worker per object. The control plane runs on the same
machine, so compare ratios within a run rather than times. With ``--alone``, the operator is measured without the peer
and up to a restart, which takes half an hour with 5,000 objects. With ``--operators N``, N operators share the
namespaces, and more than 1 implies ``--alone``.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from bench.figures import Bound, Figure, Row, Run, at_most, growth, peer, runs_file, text_table, write_run
from bench.machine import described, facts
from bench.operator import histogram
from bench.operator.audit_counts import STATUS_WRITE, about_objects
from bench.operator.life import CHILDREN, DELETE, IDLE, RESTART, SETTLED, UPDATE, Life, groups_life, operator_life
from bench.operator.slowest import slowest_tenth
from bench.operator.stand import NAMESPACES, stand
from bench.operator.subjects import LeaderWorkerSets, Operator
from devcluster.builds import binaries
from devcluster.host.arguments import counts, positive

PART: Final = "operator.scale"
PART_ALONE: Final = "operator.scale_alone"
OBJECTS: Final = (100, 300, 1000)
OBJECTS_ALONE: Final = (5000,)
MOST_OBJECTS: Final = 16_380
"""A development cluster has 16,382 Service addresses. The API server and the peer's webhook use one each."""

IDLE_S: Final = 60.0
"""Four resyncs of the operator."""

MOST_MEMORY_MB: Final = 250.0
_MEMORY_OBJECTS: Final = 1000
"""Largest number of objects to which MOST_MEMORY_MB applies."""
MOST_IDLE_PERCENT: Final = 2.0
_MB: Final = 1_000_000
_KB: Final = 1000
_MS: Final = 1000
_UNITS: Final = {"memory": "MB", "API calls until all is at rest": "calls"}
"""Units of costs that are not times."""


def _version(name: str) -> str:
    return next(group.version for group in binaries.GROUPS if group.name == name)


_PEER: Final = f"LeaderWorkerSet {_version('lws')}, same run"

Lives = tuple[Life, Life | None]
"""The life of the operator, and of LeaderWorkerSet unless the operator is measured alone."""


def figures() -> Iterator[Figure]:
    """Yield the figures of the default numbers of objects."""
    yield from figures_of_sizes(OBJECTS, IDLE_S)


def figures_alone() -> Iterator[Figure]:
    """Yield the figures of more objects, without the peer."""
    yield from figures_of_sizes(OBJECTS_ALONE, IDLE_S, alone=True)


def figures_of_sizes(
    sizes: Iterable[int], idle_s: float, *, alone: bool = False, operators: int = 1
) -> Iterator[Figure]:
    """Yield the figures of each number of objects, then the growth of each cost unless there are several operators."""
    lives, shared = {}, f", {operators} operators" * (operators > 1)
    for objects in sizes:
        lives[objects] = _lives(objects, idle_s, alone=alone, operators=operators)
        for figure in _of_size(*lives[objects]):
            yield replace(figure, name=f"{objects:,} objects{shared}: {figure.name}")
    if len(lives) > 1 and not shared:
        yield from _growth({objects: pair[0] for objects, pair in lives.items()})


def _lives(objects: int, idle_s: float, *, alone: bool, operators: int) -> Lives:
    started_s = time.monotonic()

    def say(text: str) -> None:
        print(f"  {objects} objects, {time.monotonic() - started_s:.0f} s: {text}", file=sys.stderr, flush=True)

    with stand(f"bench-operator-{os.getpid()}", objects) as cluster:
        ours = operator_life(Operator(cluster, operators), objects, idle_s, say, until=RESTART if alone else DELETE)
        if alone:
            return ours, None
        say("LeaderWorkerSets")
        return ours, groups_life(LeaderWorkerSets(cluster), objects, idle_s, say)


def _of_size(ours: Life, groups: Life | None) -> Iterator[Figure]:
    yield from _created(ours, groups)
    yield from _counted(ours)
    yield from _reconciles(ours)
    yield from _slowest(ours)
    yield from _rest(ours, groups)
    yield from _changes(ours, groups)


def _peer(groups: Life | None, value: Callable[[Life], float]) -> Bound | None:
    """Return the peer's value of a figure; None without a peer."""
    return None if groups is None else peer(value(groups), _PEER)


def _created(ours: Life, groups: Life | None) -> Iterator[Figure]:
    """Yield the costs of the creation."""
    mine = ours.costs[CHILDREN]
    made = f"3 children per object; other processes used {mine.others_cores:.1f} cores"
    if groups is not None:
        made += (
            f", {groups.costs[CHILDREN].others_cores:.1f} during the turn of the peer, which creates as many children"
        )
    parts = (*(f"{title} {_version(title.lower())}" for title in ("Kubernetes", "KWOK")), f"etcd {binaries.ETCD}")
    yield Figure("create, until all children are there", mine.wall_s, "s",
                 _peer(groups, lambda life: life.costs[CHILDREN].wall_s), made, parts)  # fmt: skip
    if groups is not None:
        yield Figure("create, times the peer's", mine.wall_s / groups.costs[CHILDREN].wall_s, "", at_most(1.0))
    yield Figure("CPU time for it", mine.cpu_s, "s", _peer(groups, lambda life: life.costs[CHILDREN].cpu_s))
    yield Figure("writes to etcd for it, of all controllers", mine.etcd_writes / ours.objects, "an object",
                 _peer(groups, lambda life: life.costs[CHILDREN].etcd_writes / life.objects))  # fmt: skip
    yield Figure("create, until all are Ready", ours.ready_s, "s", None, f"{ours.ready} are Ready; depends on KWOK")
    yield Figure("CPU time until all is at rest", ours.costs[SETTLED].cpu_s, "s",
                 _peer(groups, lambda life: life.costs[SETTLED].cpu_s),
                 "engines answer" + "; the peer's pods do not serve" * (groups is not None))  # fmt: skip
    address_s, headless_s = ours.service_s
    yield Figure("API server alone, a Service with an address", address_s * _MS, "ms",
                 peer(headless_s * _MS, "headless, as those of LeaderWorkerSet"),
                 f"allocated one at a time: at least {address_s * ours.objects:.1f} s of the creation")  # fmt: skip


def _counted(ours: Life) -> Iterator[Figure]:
    """Yield the calls, writes and bytes until the operator is idle."""
    cost = ours.costs[SETTLED]
    calls = ", ".join(
        f"{number / ours.objects:.2f} {call}" for call, number in about_objects(cost.calls).most_common(10)
    )
    yield Figure(
        "API calls",
        about_objects(cost.calls).total() / ours.objects,
        "an object",
        None,
        f"until all are Ready: {calls}",
    )
    yield Figure("status writes", cost.calls[STATUS_WRITE] / ours.objects, "an object", None, "until all are Ready")
    yield Figure("bytes to and from the API server", cost.wire_bytes / ours.objects / _KB, "kB an object", None,
                 "until all are Ready; with TLS and headers")  # fmt: skip


def _phases(ours: Life) -> list[tuple[str, str]]:
    """Return the phases whose reconciles are reported, with their names."""
    names = ((SETTLED, "create to Ready"), (IDLE, "idle"), (RESTART, "restart"), (UPDATE, "update"))
    return [(phase, what) for phase, what in names if phase in ours.costs]


def _reconciles(ours: Life) -> Iterator[Figure]:
    """Yield the durations of reconciles, from the operator's metrics."""
    for phase, what in _phases(ours):
        observed = ours.costs[phase].reconciles
        p50, p99 = (histogram.quantile(observed, share) for share in (0.5, 0.99))
        if p50 is not None and p99 is not None:
            remark = f"P50 {p50 * _MS:.0f} ms; {observed[float('inf')]:,.0f} reconciles; from the operator's histogram"
            yield Figure(f"reconcile P99, {what}", p99 * _MS, "ms", None, remark)


def _slowest(ours: Life) -> Iterator[Figure]:
    """Yield how the slowest tenth of reconciles spent its time."""
    for phase, what in _phases(ours):
        cost = ours.costs[phase]
        if (slowest := slowest_tenth(cost.looks)) is None:
            continue
        server_ms = _MS * cost.server_s / max(1, about_objects(cost.calls).total())
        remark = (
            f"{slowest.api_share:.0%} for {slowest.calls:.1f} calls of the API server "
            f"(other reconciles: {slowest.calls_of_others:.1f}) of {slowest.call_s * _MS:.0f} ms, "
            f"of which the server worked {server_ms:.0f} ms; {slowest.engines_share:.0%} for engines"
        )
        yield Figure(f"slowest tenth of reconciles, {what}: from", slowest.from_s * _MS, "ms", None, remark)


def _rest(ours: Life, groups: Life | None) -> Iterator[Figure]:
    """Yield the costs of the idle time, and memory."""
    mine = ours.costs[IDLE]
    remark = f"each engine is polled every {ours.look_interval_s:.0f} s, 35 kB each; over {mine.wall_s:.0f} s"
    yield Figure("idle CPU", 100 * mine.cpu_s / mine.wall_s, "% of a core", at_most(MOST_IDLE_PERCENT), remark)
    if groups is not None:
        theirs = groups.costs[IDLE]
        yield Figure("idle CPU, beside the peer", 100 * mine.cpu_s / mine.wall_s, "% of a core",
                     peer(100 * theirs.cpu_s / theirs.wall_s, _PEER), "which polls no engine")  # fmt: skip
    yield Figure(
        "idle, API calls", 60 * about_objects(mine.calls).total() / mine.wall_s, "a minute", None, "without Leases"
    )
    yield Figure("idle, status writes", 60 * mine.calls[STATUS_WRITE] / mine.wall_s, "a minute", at_most(0.0))
    for phase, what in ((SETTLED, "all Ready"), (RESTART, "after a restart")):
        now = ours.memory[phase]
        theirs_mb = _peer(groups, lambda life, phase=phase: life.memory[phase].now_bytes / _MB)  # type: ignore[misc]
        yield Figure(f"memory, {what}", now.now_bytes / _MB, "MB", theirs_mb)
        limit = at_most(MOST_MEMORY_MB) if ours.objects <= _MEMORY_OBJECTS else None
        yield Figure(f"memory at most, {what}", now.peak_bytes / _MB, "MB", limit)


def _changes(ours: Life, groups: Life | None) -> Iterator[Figure]:
    """Yield the costs of single changes, a restart, a change of all objects, and their deletion."""
    worst = f"worst {max(ours.reactions_s) * _MS:.0f}; each after a rest"
    if groups is not None:
        worst += f"; worst of the peer {max(groups.reactions_s) * _MS:.0f}"
    yield Figure(f"one change amid them, median of {len(ours.reactions_s)}", _reaction_ms(ours), "ms",
                 _peer(groups, _reaction_ms), worst)  # fmt: skip
    yield Figure("restart, until 3 changes are acted on", ours.restart_s, "s",
                 _peer(groups, lambda life: life.restart_s),
                 "made while down" + "; of the peer when its webhook answers" * (groups is not None))  # fmt: skip
    yield Figure("CPU time of a restart, until all is at rest", ours.costs[RESTART].cpu_s, "s",
                 _peer(groups, lambda life: life.costs[RESTART].cpu_s))  # fmt: skip
    yield Figure("API calls of a restart", _restart_calls(ours), "an object", _peer(groups, _restart_calls))
    if groups is None:
        return
    update, delete = ours.costs[UPDATE], ours.costs[DELETE]
    yield Figure("update of all, until all workloads have it", update.wall_s, "s", None, f"{update.cpu_s:.1f} s of CPU")
    yield Figure("delete of all, until no child is left", delete.wall_s, "s", peer(groups.costs[DELETE].wall_s, _PEER),
                 f"{delete.cpu_s:.1f} s of CPU")  # fmt: skip


def _reaction_ms(life: Life) -> float:
    return statistics.median(life.reactions_s) * _MS


def _restart_calls(life: Life) -> float:
    return about_objects(life.costs[RESTART].calls).total() / life.objects


def _growth(lives: Mapping[int, Life]) -> Iterator[Figure]:
    """Yield the growth of each cost with the number of objects."""
    costs = {
        "CPU time until all children are there": {n: life.costs[CHILDREN].cpu_s for n, life in lives.items()},
        "create, until all children are there": {n: life.costs[CHILDREN].wall_s for n, life in lives.items()},
        "CPU time until all is at rest": {n: life.costs[SETTLED].cpu_s for n, life in lives.items()},
        "idle CPU time": {n: life.costs[IDLE].cpu_s for n, life in lives.items()},
        "update of all": {n: life.costs[UPDATE].wall_s for n, life in lives.items() if UPDATE in life.costs},
        "restart": {n: life.restart_s for n, life in lives.items()},
        "one change amid them": {n: statistics.median(life.reactions_s) for n, life in lives.items()},
        "API calls until all is at rest": {
            n: float(about_objects(life.costs[SETTLED].calls).total()) for n, life in lives.items()
        },
        "memory": {n: life.memory[SETTLED].now_bytes / _MB for n, life in lives.items()},
    }
    for name, values in costs.items():
        if values and all(values.values()):
            yield growth(name, _UNITS.get(name, "s"), values)


def _sizes(text: str) -> tuple[int, ...]:
    """Parse numbers of objects that a cluster has addresses for."""
    sizes = counts(text)
    if max(sizes) > MOST_OBJECTS:
        raise argparse.ArgumentTypeError(
            f"{text!r}: use {MOST_OBJECTS:,} at most: each object takes a Service address, and a development cluster"
            " has 16,382"
        )
    return sizes


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return 130 on Ctrl-C."""
    parser = argparse.ArgumentParser(prog="./just bench-operator")
    objects = ",".join(map(str, OBJECTS))
    sizes = "numbers of objects, each measured separately (default: %(default)s)"
    parser.add_argument("--objects", type=_sizes, default=objects, metavar="N,…", help=sizes)
    idle = "length of the idle phase (default: %(default)g)"
    parser.add_argument("--idle", type=positive, default=IDLE_S, metavar="SECONDS", help=idle)
    alone = "without the peer, up to the restart"
    parser.add_argument("--alone", action="store_true", help=alone)
    several = range(1, len(NAMESPACES) + 1)
    shared = "number of operators that share the namespaces; more than 1 implies --alone (default: %(default)s)"
    parser.add_argument("--operators", type=int, default=1, choices=several, metavar="N", help=shared)
    parser.add_argument(
        "--json", type=runs_file, metavar="FILE", help="add the run to FILE, with the facts of the machine"
    )
    asked = parser.parse_args(arguments)
    asked.alone |= asked.operators > 1
    try:
        _measure(asked)
    except KeyboardInterrupt:
        print("bench-operator: interrupted, the cluster is removed", file=sys.stderr)
        return 130
    return 0


def _measure(asked: argparse.Namespace) -> None:
    machine = facts()
    rows: list[Row] = []
    for figure in figures_of_sizes(asked.objects, asked.idle, alone=asked.alone, operators=asked.operators):
        rows.append(Row(PART_ALONE if asked.alone else PART, figure))
        if asked.json:  # keep the rows if the next size fails
            write_run(asked.json, Run(machine, rows))
    print("\n".join(text_table(rows)))
    print(f"\n{described(machine, (each for row in rows for each in row.figure.parts))}")


if __name__ == "__main__":
    sys.exit(main())
