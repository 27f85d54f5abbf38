"""Measures the life of many objects, from creation to deletion."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.operator.addresses import service_s
from bench.operator.histogram import value
from bench.operator.phases import SETTLED_QUIET_S, Cost, Measured
from bench.operator.process_use import Memory
from bench.operator.subjects import LeaderWorkerSets, Operator
from tests.support.waiting import eventually

CHILDREN, SETTLED, IDLE, RESTART, UPDATE, DELETE = "children", "settled", "idle", "restart", "update", "delete"


@dataclass
class Life:
    """Costs of one controller for one number of objects."""

    objects: int
    idle_s: float
    costs: dict[str, Cost] = field(default_factory=dict)
    """By phase. ``settled`` begins with ``children``, and ends when the controller is idle."""

    reactions_s: list[float] = field(default_factory=list)
    restart_s: float = 0.0
    """From the start of the controller until it has applied changes that were made while it was down."""

    service_s: tuple[float, float] = (0.0, 0.0)
    """Time of the API server for a Service with an address, and for a headless Service."""

    look_interval_s: float = 0.0
    """Polling interval per engine, from the metrics of the operator."""

    ready: int = 0
    ready_s: float = 0.0
    memory: dict[str, Memory] = field(default_factory=dict)
    """After each phase."""


def operator_life(
    operator: Operator, objects: int, idle_s: float, say: Callable[[str], None], *, until: str = DELETE
) -> Life:
    """Measure this operator up to the phase RESTART or DELETE."""
    life, measured = Life(objects, idle_s), Measured(operator, objects, say)
    life.service_s = service_s(operator.stand, headless=False), service_s(operator.stand, headless=True)
    with measured.running():
        with measured.costing(life.costs, SETTLED):
            started_s = time.monotonic()
            with measured.costing(life.costs, CHILDREN):
                measured.create()
            life.ready = measured.wait_until_ready()
            life.ready_s = time.monotonic() - started_s
            measured.rest(SETTLED_QUIET_S)
        life.memory[SETTLED] = measured.memory()
        life.look_interval_s = value(operator.metrics(), "specdecode_look_interval_seconds")
        _steady(life, measured)
        if until == RESTART:
            return life
        with measured.costing(life.costs, UPDATE):
            measured.update(operator.update)
        measured.wait_until_ready()
        measured.rest()
        life.memory[UPDATE] = measured.memory()
        with measured.costing(life.costs, DELETE):
            measured.delete()
    return life


def groups_life(groups: LeaderWorkerSets, objects: int, idle_s: float, say: Callable[[str], None]) -> Life:
    """Measure the controller of LeaderWorkerSets."""
    eventually(lambda: not groups.stand.has_pods(), "no pods are left", 300.0 + objects)
    groups.start()  # a watch needs its CRD
    life, measured = Life(objects, idle_s), Measured(groups, objects, say)
    with measured.running():
        with measured.costing(life.costs, SETTLED):
            with measured.costing(life.costs, CHILDREN):
                measured.create()
            measured.rest()
        life.memory[SETTLED] = measured.memory()
        _steady(life, measured)
        with measured.costing(life.costs, DELETE):
            measured.delete()
    return life


def _steady(life: Life, measured: Measured) -> None:
    """Measure the idle time, single changes and a restart, with all objects present."""
    with measured.costing(life.costs, IDLE):
        time.sleep(life.idle_s)
    life.reactions_s = measured.reactions_s()
    measured.rest()
    with measured.costing(life.costs, RESTART):
        life.restart_s = measured.restart()
        measured.rest()
    life.memory[RESTART] = measured.memory()
