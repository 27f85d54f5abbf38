"""What the counters of a LeaderWorkerSet say, which names no template: as much as its present pods bear out."""

from specdecode_operator.deployment.rollout.rollout_progress import NO_GROUP_HISTORY, read_group_rollout
from tests.unit.deployment.pods.groups import desired_state_of, live, pod_of, pods_of, workload_of


def test_groups_of_an_earlier_template_serve_until_theirs_have_their_turn() -> None:
    workload = workload_of(desired_state_of())
    rolling = live(workload, replicas=2, updated=1, ready=2)
    found = read_group_rollout(rolling, pods_of(workload, ready=False), 2, NO_GROUP_HISTORY, None)
    assert (found.updated, found.available) == (1, 1)
    both = read_group_rollout(rolling, pods_of(workload), 2, NO_GROUP_HISTORY, None)
    assert (both.updated, both.available, both.complete) == (1, 2, False)


def test_a_leader_that_is_to_go_is_none_of_this_template() -> None:
    workload = workload_of(desired_state_of())
    going = pod_of(workload["spec"]["leaderWorkerTemplate"]["leaderTemplate"], 0, 0, deleted=True)
    found = read_group_rollout(live(workload), [going], 1, NO_GROUP_HISTORY, None)
    assert (found.updated, found.available, found.complete) == (0, 1, False)
