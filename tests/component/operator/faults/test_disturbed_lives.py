"""What the operator hears and reads of objects goes wrong all their lives: in the end all is as if it had not."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from devcluster.cluster.cluster import Cluster
from specdecode_operator.handlers.leadership import LeaseName
from tests.component.operator.faults.conftest import Faulty
from tests.component.operator.faults.lives import Lives
from tests.support.faults.crash_points import CrashPoint
from tests.support.faults.faults import DropEvent, Fault, RepeatEvent, Silence, Stale
from tests.support.faults.user_actions import repeated_status_writes
from tests.support.kubectl import Kubectl
from tests.support.operator_process import NAMESPACE, SERVICE_ACCOUNT, OperatorProcess
from tests.support.waiting import eventually

HURRY = 30
"""What was missed is seen with a watch that is opened anew or the next full list: after minutes, usually."""

LASTING = {
    "events that are lost": [Fault(DropEvent(), share=0.3)],
    "watches that go silent": [Fault(Silence(), share=0.2)],
    "old lists": [Fault(Stale(), "list *", share=0.7)],
    "old objects": [Fault(Stale(), "get *", share=0.5)],
    "old lists and lost events": [Fault(Stale(), "list *", share=0.5), Fault(DropEvent(), share=0.2)],
}
RESTART = CrashPoint("patch deployments.apps tiny", 2)
"""In the middle of a life: who starts then is told of how it was before."""


DAY_S = 24 * 3600
CLOCK_S = [DAY_S, -DAY_S, 0, DAY_S]
"""How far the wall clock of the operator's machine is ahead from each step of a life on."""


@contextmanager
def under(faulty: Faulty, **circumstances: Any) -> Iterator[None]:
    usual = faulty.operator.circumstances
    faulty.operator.circumstances = replace(usual, **circumstances)
    try:
        yield
    finally:
        faulty.operator.circumstances = usual


def test_repeated_watch_events_do_not_repeat_status_writes(lives: Lives, faulty: Faulty) -> None:
    lives.disturbed("capture", faults=[Fault(RepeatEvent())])
    assert not repeated_status_writes([*faulty.proxy.calls])


@pytest.mark.long
@pytest.mark.parametrize("life", ["deployment", "capture"])
@pytest.mark.parametrize("fault", LASTING)
def test_lives_survive_lasting_faults(lives: Lives, faulty: Faulty, fault: str, life: str) -> None:
    with under(faulty, hurry=HURRY):
        assert lives.disturbed(life, [RESTART], LASTING[fault]) == []
    assert not repeated_status_writes([*faulty.proxy.calls])


@pytest.mark.long
@pytest.mark.parametrize("life", ["deployment", "capture"])
def test_clock_jumps_disturb_no_life_and_do_not_move_the_lease_early(
    crds: Cluster, lives: Lives, faulty: Faulty, operator_process: OperatorProcess, life: str
) -> None:
    """Another operator, whose clock is right, waits for the Lease."""
    admin = Kubectl(crds.kubeconfig, NAMESPACE)

    def lease() -> tuple[str, int]:
        spec = admin.object("lease", SERVICE_ACCOUNT)["spec"]
        return spec.get("holderIdentity"), spec["leaseTransitions"]

    held = []

    def jump(step: int) -> None:
        if step == 1:
            eventually(lambda: lease()[0] == "jumps", "it has the Lease")
            held.append(lease())
            operator_process.start()
        faulty.operator.set_clock(CLOCK_S[step - 1])

    try:
        with under(faulty, lease=LeaseName(NAMESPACE, SERVICE_ACCOUNT, "jumps", 15)):
            lives.disturbed(life, before_step=jump)
        # Its last renewal is of tomorrow.
        eventually(lambda: lease() == ("pod-1", held[0][1] + 1), "the other one takes over, for the first time")
    finally:
        faulty.operator.set_clock(0)
