"""Largest GPU hours of a scheduled training, for its reservation and for the plan."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from specdecode_operator.api.deployment import Key, ScheduledTraining
from specdecode_operator.api.training import TrainingRun
from specdecode_operator.capture.observation import CapturedDeployment
from specdecode_operator.deployment.desired_state import Launch
from specdecode_operator.deployment.planning import plan_status
from specdecode_operator.deployment.spec_facts import Facts
from specdecode_operator.problems import Problem
from specdecode_operator.sizing.plan import Plan
from specdecode_operator.training.job_manifest import GRACE_S
from specdecode_operator.training.judge import longest_measurement_s
from specdecode_operator.training.preconditions import run_blocked, trainer_gpus

BUDGET_TOO_SMALL: Final = "BudgetTooSmall"
HOUR_S: Final = 3600
OF_TEMPLATE: Final = re.compile(r"\bspec\.(trainer|method)\b")
"""Field of a SpecDecodeTraining in a message. A schedule has it in training.template."""


@dataclass(frozen=True)
class Cost:
    """GPUs of a training, and the GPU seconds that it can use at most."""

    gpus: int
    gpu_seconds: int

    def __str__(self) -> str:
        return f"{hours(self.gpu_seconds)} GPU hours on {self.gpus} GPU{'' if self.gpus == 1 else 's'}"


def largest_cost(run: TrainingRun, source: CapturedDeployment) -> Cost:
    """Return the largest use of a training with its measurement.

    Each pod counts with the number of GPUs of the trainer, which is at least that of an engine.
    """
    gpus = trainer_gpus(run, source)
    attempts_s = (run.deadline_seconds + GRACE_S) * (1 + run.backoff_limit)
    return Cost(gpus, gpus * (attempts_s + longest_measurement_s(run, source) + GRACE_S))


def budget_problem(training: ScheduledTraining, cost: Cost) -> str | None:
    """Return why the budget of a month is too small for one training; None if it is not."""
    if cost.gpu_seconds <= training.gpu_hours_per_month * HOUR_S:
        return None
    return (
        f"one training can use {cost}, more than the monthly limit: set {-(-cost.gpu_seconds // HOUR_S)} or more,"
        " or lower template.deadlineSeconds, template.backoffLimit or template.judgement.repetitions"
    )


def hours(gpu_seconds: int) -> str:
    """Format GPU seconds as GPU hours."""
    return f"{gpu_seconds / HOUR_S:.1f}"


@dataclass(frozen=True)
class PlannedRefresh:
    """Largest cost of a schedule's training on the planned GPUs."""

    note: str
    reason: str = ""  # of the problem
    problem: Problem | None = None  # why no training can ever start
    is_certain: bool = False  # The problem is the same on other GPUs.


def planned_refreshes(key: Key, facts: Facts, plan: Plan) -> Iterator[PlannedRefresh]:
    """Yield the largest cost of a training of each schedule."""
    schedules = [each for each in facts.spec.captures if each.training is not None]
    if not schedules:
        return
    source = CapturedDeployment(key, "", 0, Launch(facts, plan, plan_status(facts, plan)))
    for schedule in schedules:
        training = schedule.training
        assert training is not None  # noqa: S101  filtered above
        where = f"captures[name={schedule.name}].training"
        if (blocked := run_blocked(training.template, source)) is not None:
            message = OF_TEMPLATE.sub(rf"{where}.template.\1", blocked.message)
            yield PlannedRefresh("", blocked.reason, Problem("", "", message))
            continue
        cost, limit = largest_cost(training.template, source), training.gpu_hours_per_month
        told = budget_problem(training, cost)
        problem = Problem(f"spec.{where}.gpuHoursPerMonth", str(limit), told) if told else None
        note = f"{where}: one training uses at most {cost}, of {limit} GPU hours per month"
        fewest = training.template.trainer.gpus or 1
        is_certain = cost.gpus > 0 and cost.gpu_seconds // cost.gpus * fewest > limit * HOUR_S
        yield PlannedRefresh(note, BUDGET_TOO_SMALL if told else "", problem, is_certain)
