"""Random actions of people, kills and faults: all ends as after a fresh apply of the same specs."""

import os
import random
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from devcluster.cluster.cluster import Cluster
from tests.component.operator.faults.conftest import Faulty
from tests.support.faults.faults import (
    Delay,
    DelayEvent,
    EndWatch,
    Fault,
    Refuse,
    RepeatEvent,
    Reset,
    Truncate,
)
from tests.support.faults.user_actions import UserActions, World
from tests.support.kubectl import Kubectl
from tests.support.waiting import DEADLINE_S

OFTEN = [
    Fault(Delay(0.2), share=0.5),
    Fault(Reset(), share=0.2),
    Fault(Reset(after=True), "[!w]*", share=0.2),
    Fault(Refuse(401), share=0.1),
    Fault(Refuse(409), "patch *", share=0.3),
    Fault(Refuse(429, retry_after_s=1), share=0.2),
    Fault(Refuse(500), share=0.3),
    Fault(Truncate(), "[!w]*", share=0.2),
    Fault(Truncate(is_noticed=False), "[!w]*", share=0.2),
    Fault(RepeatEvent(), share=0.5),
    Fault(DelayEvent(0.3), share=0.3),
    Fault(EndWatch(), share=0.2),
]
"""What no longer hinders anybody once it is over."""

RICH = 808
"""A seed with nearly every action in few steps: editing, deleting and making anew, a kill, a capture, a fault.

A name is taken before an object would have it, and children are edited, each shortly before a look.
"""

SEED = "SPECDECODE_SEED"
TONIGHT = int(os.environ.get(SEED) or random.SystemRandom().randrange(2**32))
"""Another one each time, or that of the environment, for once more what a night has found."""

BOUNDED = settings(
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[*HealthCheck],
    max_examples=2,  # the first one is always the simplest
    stateful_step_count=20,
)


MANY = settings(BOUNDED, max_examples=12, stateful_step_count=40)


def run(world: World, bounds: settings, drawn: int) -> None:
    """Let people act."""

    def people() -> UserActions:
        return UserActions(world)

    run_state_machine_as_test(seed(drawn)(people), settings=bounds)  # type: ignore[arg-type]


def world(crds: Cluster, faulty: Faulty, faults: Sequence[Fault], deadline_s: float) -> World:
    return World(Kubectl(crds.kubeconfig), faulty.proxy, faulty.operator, faults, deadline_s)


def test_random_user_actions_end_like_a_fresh_apply(crds: Cluster, behind_proxy: Faulty) -> None:
    run(world(crds, behind_proxy, OFTEN, DEADLINE_S), BOUNDED, drawn=RICH)


@pytest.mark.long
def test_many_random_user_actions_with_new_seed_end_like_a_fresh_apply(crds: Cluster, behind_proxy: Faulty) -> None:
    try:
        run(world(crds, behind_proxy, OFTEN, DEADLINE_S), MANY, drawn=TONIGHT)
    except BaseException as error:
        error.add_note(f"once more: {SEED}={TONIGHT} ./just test -m long {__file__}")
        raise
