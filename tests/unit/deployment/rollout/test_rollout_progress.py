"""Rollouts of groups: progress, crashes, deadlines, and messages of Pod Security."""

import copy
import json
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import Key
from specdecode_operator.api.deployment_status import Condition
from specdecode_operator.deployment.desired_state import Launch, RolledBack
from specdecode_operator.deployment.engine_pod import engine_timeouts
from specdecode_operator.deployment.observed.observation import (
    Observation,
    rollout_of,
    update_group_history,
    update_last_good,
)
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.deployment.rollout.engine_workload import serving_template
from specdecode_operator.deployment.rollout.rollback import LastGood, read_last_good, render_last_good
from specdecode_operator.deployment.rollout.rollout_progress import (
    NO_GROUP_HISTORY,
    GroupHistory,
    current_pods,
    name_pod_security_field,
    observe_groups,
    only_startup_changes,
    read_group_rollout,
    template_hash,
)
from specdecode_operator.deployment.status import compose_status
from tests.support.decisions import desired_state
from tests.support.objects import ended, parent, waiting
from tests.unit.deployment.group_pods import NOW, desired_state_of, live, pod_of, pods_of, workload_of
from tests.unit.deployment.test_groups import FOUR_H100, STAGES, ngram

NO_MEMORY = "ValueError: No available memory for the cache blocks."


def conditions(spec: Body, observation: Observation) -> dict[str, Condition]:
    owner = parse_deployment(parent(spec))
    status = compose_status(owner, desired_state_of(spec), observation, NOW)
    return {condition.type: condition for condition in status.conditions}


def test_status_counters_of_an_earlier_template_are_ignored() -> None:
    """The status of a LeaderWorkerSet names no generation: right after a change it still is that of before."""
    earlier, workload = (
        workload_of(desired_state_of()),
        workload_of(desired_state_of({**STAGES, "serving": {"maxModelLen": 4096}})),
    )
    assert template_hash(serving_template(earlier)) != template_hash(serving_template(workload))
    stale = live(workload)
    pods = current_pods(pods_of(earlier), stale)
    assert pods == []
    assert (
        conditions({**STAGES, "serving": {"maxModelLen": 4096}}, Observation(stale, pods))["Ready"].status == "Unknown"
    )
    new = current_pods(pods_of(workload, ready=False), stale)
    found = conditions({**STAGES, "serving": {"maxModelLen": 4096}}, Observation(stale, new))
    assert found["Ready"].status == "Unknown", "the counters still speak of pods that are gone"


@pytest.mark.parametrize("role", ["leaderTemplate", "workerTemplate"])
def test_blocked_leader_or_worker_pod_is_reported(role: str) -> None:
    workload = workload_of(desired_state_of())
    template = workload["spec"]["leaderWorkerTemplate"][role]
    worker = int(role == "workerTemplate")
    stuck = pod_of(template, 0, worker, ready=False, containerStatuses=[waiting("ImagePullBackOff", "no such image")])
    found = conditions(STAGES, Observation(live(workload, ready=0), [stuck]))
    assert found["Ready"].reason == "ImagePullFailed"


# --- what is remembered of groups whose pods are gone


@pytest.fixture
def template() -> Body:
    body: Body = workload_of(desired_state_of())["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    return body


def crashed(template: Body, worker: int = 1, at: str = "2026-01-01T00:10:00Z", words: str = "boom") -> Body:
    container = ended(1, words) | {"restartCount": 1}
    container["lastState"]["terminated"]["finishedAt"] = at
    return pod_of(template, 0, worker, ready=False, containerStatuses=[container])


def test_first_crashed_pod_of_a_group_gives_the_reason(template: Body) -> None:
    first = crashed(template, 1, "2026-01-01T00:10:00Z", "RuntimeError: the root of it")
    later = crashed(template, 0, "2026-01-01T00:10:07Z", "RuntimeError: lost a peer")
    history = observe_groups(NO_GROUP_HISTORY, "a", [later, first], 0.0, serve=False)
    assert history.blocked is not None
    assert "the root of it" in history.blocked.message


def test_pods_deleted_with_their_group_do_not_count_as_crashes(template: Body) -> None:
    container = ended(143, "") | {"restartCount": 1}
    ending = pod_of(template, 0, 1, ready=False, deleted=True, containerStatuses=[container])
    assert observe_groups(NO_GROUP_HISTORY, "a", [ending], 0.0, serve=False).crashes == 0


def test_group_wait_time_ends_when_serving_and_resets_per_template() -> None:
    history = observe_groups(NO_GROUP_HISTORY, "a", [], 100.0, serve=False)
    assert observe_groups(history, "a", [], 160.0, serve=False).waited_s == 60
    served = observe_groups(history, "a", [], 170.0, serve=True)
    assert observe_groups(served, "a", [], 9999.0, serve=False).waited_s == 0, (
        "what befalls them later is no failed start"
    )
    assert observe_groups(history, "b", [], 9999.0, serve=False).waited_s == 0


def test_groups_not_ready_by_the_progress_deadline_are_overdue() -> None:
    desired = desired_state_of()
    workload = workload_of(desired)
    assert isinstance(desired.outcome, Launch)
    deadline_s = engine_timeouts(desired.outcome.facts, desired.outcome.plan).progress_deadline_s
    seen = Observation(live(workload, ready=0), pods_of(workload, ready=False))
    for waited_s, overdue in ((deadline_s - 1.0, False), (float(deadline_s), True)):
        history = GroupHistory("a", waited_s=waited_s)
        assert rollout_of(desired.outcome, replace(seen, groups=history)).overdue is overdue
    found = conditions(STAGES, replace(seen, groups=history))
    assert found["Ready"].reason == "EngineReadyTimeout"


# --- from one spec to another


class Story:
    """One object through its changes, as a reconciler would take it."""

    def __init__(self) -> None:
        self.memory: LastGood | None = None
        self.history: GroupHistory | None = None
        self.seconds = 0.0
        self.conditions: dict[str, Condition] = {}

    def look(self, spec: Body, pods: list[Body] | None = None, *, ready: int = 0) -> dict[str, Condition]:
        """Reconcile with these pods; return the conditions."""
        owner = parse_deployment(parent(spec))
        kept = render_last_good(owner.key, owner.uid, self.memory) if self.memory else None
        memory = read_last_good(json.loads(json.dumps(kept)))
        self.desired = desired_state(owner, FOUR_H100, has_leader_worker_sets=True, last_good=memory)
        workload = live(workload_of(self.desired), ready=ready)
        if pods is None:
            pods = pods_of(workload) if ready and workload["kind"] == "LeaderWorkerSet" else []
        observation = Observation(workload, current_pods(pods, workload))
        self.seconds += 1
        self.history = update_group_history(self.history, self.desired, observation, memory, self.seconds)
        observation = replace(observation, groups=self.history)
        status = compose_status(owner, self.desired, observation, NOW)
        self.memory = update_last_good(self.desired, observation, memory)
        self.conditions = {condition.type: condition for condition in status.conditions}
        return self.conditions

    def restart_operator(self) -> None:
        """Forget what only the operator's process knows."""
        self.history = None

    @property
    def hash(self) -> str | None:
        """Hash of the template that is wanted."""
        return template_hash(serving_template(workload_of(self.desired)))


@pytest.fixture
def story() -> Story:
    story = Story()
    assert story.look(STAGES, ready=1)["Ready"].reason == "Serving"
    return story


def test_crash_counts_survive_operator_restarts(story: Story) -> None:
    good, changed = story.hash, {**STAGES, "serving": {"maxModelLen": 4096}}
    story.look(changed)
    bad = workload_of(story.desired)["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    for _ in range(3):
        story.restart_operator()
        assert story.look(changed, [])["Ready"].reason != "RolledBack"
        pods = [crashed(bad, words="RuntimeError: NCCL error")]
        story.look(changed, pods)
        story.restart_operator()
        story.look(changed, pods)
    assert story.look(changed, ready=1)["Ready"].reason == "RolledBack"
    assert story.hash == good
    assert "NCCL error" in story.conditions["Ready"].message


def test_failed_leader_worker_set_rolls_back_to_the_deployment() -> None:
    single, story = ngram("meta-llama/Llama-3.1-70B-Instruct", parallelism={"tensor": 4}), Story()
    assert story.look(single, ready=1)["Ready"].reason == "Serving"
    good = workload_of(story.desired)
    wide = ngram("meta-llama/Llama-3.1-70B-Instruct", parallelism={"tensor": 8, "pipeline": 2}, replicas=2)
    story.look(wide)
    workload = workload_of(story.desired)
    assert workload["kind"] == "LeaderWorkerSet"
    failing = workload["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
    story.look(wide, [pod_of(failing, 0, 0, ready=False, containerStatuses=[ended(1, NO_MEMORY)])])
    story.look(wide, ready=1)
    back = workload_of(story.desired)
    assert isinstance(story.desired.outcome, RolledBack)
    assert (back["kind"], back["metadata"]["name"]) == ("Deployment", "llama")
    assert back["spec"]["template"] == good["spec"]["template"]
    assert back["spec"]["replicas"] == 2, "their number is the present one"


@pytest.mark.parametrize("idle", [{"suspend": True}, {"rollout": {"paused": True}}])
def test_suspended_or_paused_time_does_not_count_to_the_deadline(story: Story, idle: Body) -> None:
    """Changed while suspended and resumed days later, a spec has all the time that it needs."""
    changed = {**STAGES, "serving": {"maxModelLen": 4096}}
    story.look({**changed, **idle})
    story.seconds += 500_000
    story.look({**changed, **idle})
    assert story.look(changed)["Ready"].reason == "Starting"
    story.seconds += 500_000
    assert story.look(changed)["Ready"].reason == "EngineReadyTimeout"
    assert story.memory is not None
    assert story.memory.failure is not None


def test_first_seen_time_in_the_future_resets_the_wait() -> None:
    """Another operator has seen them while a clock was ahead; else they would be waited for as much longer."""
    seen = observe_groups(NO_GROUP_HISTORY, "a", [], 9000.0, serve=False)
    now = observe_groups(seen, "a", [], 100.0, serve=False)
    assert (now.first_seen_s, now.waited_s) == (100.0, 0.0)
    assert observe_groups(now, "a", [], 160.0, serve=False).waited_s == 60.0


def test_earlier_groups_count_as_available_during_a_rollout() -> None:
    workload = workload_of(desired_state_of())
    rolling = live(workload, replicas=2, updated=1, ready=2)
    found = read_group_rollout(rolling, pods_of(workload, ready=False), 2, NO_GROUP_HISTORY, None)
    assert (found.updated, found.available) == (1, 1)
    both = read_group_rollout(rolling, pods_of(workload), 2, NO_GROUP_HISTORY, None)
    assert (both.updated, both.available, both.complete) == (1, 2, False)


START = 'pods "x" is forbidden: violates PodSecurity "restricted:latest": '
"""As an API server of Kubernetes 1.34 begins."""


@pytest.mark.parametrize(
    ("said", "field"),
    [
        (
            'runAsNonRoot != true (pod or container "engine" must set securityContext.runAsNonRoot=true)',
            "spec.podTemplate.spec.securityContext",
        ),
        ("runAsUser=0 (pod must not set runAsUser=0)", "spec.podTemplate.spec.securityContext"),
        (
            'allowPrivilegeEscalation != false (containers "shipper", "proxy" must set that)',
            "securityContext of shipper in spec.podTemplate.spec.containers, securityContext of proxy",
        ),
        ('hostPath volumes (volume "models")', "spec.models.volume.hostPath"),
        (
            'restricted volume types (volume "v" uses restricted volume type "nfs")',
            "spec.podTemplate.spec.volumes",
        ),
        ("host namespaces (hostNetwork=true)", "hostNetwork, hostPID and hostIPC of spec.podTemplate.spec"),
        ("something new (of a later version)", "spec.podTemplate"),
    ],
)
def test_pod_security_violation_names_the_spec_field(said: str, field: str) -> None:
    told = name_pod_security_field(START + said)
    assert told.startswith(START + said)
    assert f"change {field}" in told
    assert "pod-security.kubernetes.io/enforce" in told


KEY = Key("team", "llama")


class TestOnlyStarts:
    """Events of starting engines that need no reconcile."""

    DEPLOYMENT = ("Deployment", "llama")
    POD = ("Pod", "llama-1")
    SCHEDULED: ClassVar[Body] = {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "True"}]}

    def deployment(self, spec: Body | None = None, annotations: Body | None = None, **status: Any) -> Body:
        metadata = {"name": "llama", "generation": 1, "labels": {"a": "b"}, "annotations": annotations or {}}
        status = {"observedGeneration": 1, "replicas": 1, "unavailableReplicas": 1, **status}
        return {"metadata": metadata, "spec": {"replicas": 1, **(spec or {})}, "status": status}

    def pod(self, status: Body, **metadata: Any) -> Body:
        owner = {"kind": "ReplicaSet", "name": "llama-5d7f", "controller": True}
        labels = {"pod-template-hash": "5d7f"}
        return {
            "metadata": {"name": "llama-1", "labels": labels, "ownerReferences": [owner], **metadata},
            "status": status,
        }

    def ready(self) -> Body:
        return self.pod({"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]})

    @pytest.mark.parametrize(
        "status",
        [
            {},
            SCHEDULED,
            {"phase": "Pending", "containerStatuses": [waiting("ContainerCreating")]},
            {"phase": "Running", "containerStatuses": [{"name": "engine", "state": {"running": {}}}]},
            {
                "phase": "Pending",
                "initContainerStatuses": [{"name": "download", "state": {"terminated": {"exitCode": 0}}}],
                "containerStatuses": [waiting("PodInitializing")],
            },
        ],
        ids=["created", "scheduled", "creating", "running", "downloaded"],
    )
    def test_starting_pod_is_no_news(self, status: Body) -> None:
        now = {self.DEPLOYMENT: self.deployment(), self.POD: self.pod(status)}
        assert only_startup_changes(KEY, {self.DEPLOYMENT: self.deployment()}, now)
        assert only_startup_changes(KEY, {**now, self.POD: self.pod(self.SCHEDULED)}, now)

    @pytest.mark.parametrize(
        ("status", "metadata"),
        [
            ({"conditions": [{"type": "PodScheduled", "status": "False"}]}, {}),
            ({"phase": "Failed"}, {}),
            ({"containerStatuses": [waiting("ImagePullBackOff")]}, {}),
            ({"initContainerStatuses": [waiting("CreateContainerConfigError", container="download")]}, {}),
            ({"containerStatuses": [ended(1)]}, {}),
            ({"containerStatuses": [{"name": "engine", "restartCount": 1, "state": {"running": {}}}]}, {}),
            ({"containerStatuses": [{"name": "engine", "state": {"terminated": {"exitCode": 0}}}]}, {}),
            (
                {"initContainerStatuses": [{"name": "download", "state": {"terminated": {"exitCode": 1}}}]},
                {},
            ),
            (SCHEDULED, {"deletionTimestamp": "2026-01-01T00:00:00Z"}),
            (SCHEDULED, {"labels": {"pod-template-hash": "5d7f", "another": "label"}}),
            ({"conditions": [{"type": "DisruptionTarget", "status": "True"}]}, {}),
        ],
        ids=[
            *("unschedulable", "failed", "no image", "no configuration", "crash", "restarted", "ended", "no download"),
            *("deleted", "relabelled", "disrupted"),
        ],
    )
    def test_problem_of_a_pod_and_its_end_are_news(self, status: Body, metadata: Body) -> None:
        well, wrong = (
            {self.DEPLOYMENT: self.deployment(), self.POD: each}
            for each in (self.pod(self.SCHEDULED), self.pod(status, **metadata))
        )
        assert not only_startup_changes(KEY, well, wrong)
        assert not only_startup_changes(KEY, wrong, well)

    def test_ready_pod_is_news_when_its_deployment_counts_it(self) -> None:
        starting, ready = self.pod(self.SCHEDULED), self.ready()
        uncounted, counted = self.deployment(), self.deployment(readyReplicas=1)
        before = {self.DEPLOYMENT: uncounted, self.POD: starting}
        assert only_startup_changes(KEY, before, {self.DEPLOYMENT: uncounted, self.POD: ready})
        assert not only_startup_changes(KEY, before, {self.DEPLOYMENT: counted, self.POD: ready})
        assert not only_startup_changes(
            KEY, {**before, self.DEPLOYMENT: counted}, {self.DEPLOYMENT: counted, self.POD: ready}
        )
        assert not only_startup_changes(KEY, {self.POD: starting}, {self.POD: ready}), (
            "without a Deployment, no other event follows"
        )
        assert not only_startup_changes(KEY, {self.DEPLOYMENT: uncounted, self.POD: ready}, before), (
            "it is no longer ready"
        )

    def test_other_ready_children_are_not_counted_as_pods(self) -> None:
        scaler = {("ScaledObject", "llama"): {**self.ready(), "metadata": {"name": "llama"}}}
        before = {self.DEPLOYMENT: self.deployment(readyReplicas=1), self.POD: self.pod(self.SCHEDULED), **scaler}
        assert not only_startup_changes(KEY, before, {**before, self.POD: self.ready()})

    def test_removed_child_and_other_kinds_are_news(self) -> None:
        service = {"metadata": {"name": "llama"}}
        assert not only_startup_changes(KEY, {("Service", "llama"): service}, {})
        assert not only_startup_changes(KEY, {}, {("Service", "llama"): service})
        assert only_startup_changes(
            KEY, {("Service", "llama"): service}, {("Service", "llama"): copy.deepcopy(service)}
        )

    @pytest.mark.parametrize(
        ("changes", "is_news"),
        [
            ({"updatedReplicas": 1}, False),
            ({"annotations": {"deployment.kubernetes.io/revision": "1"}}, False),
            ({"annotations": {"other": "1"}}, True),
            ({"spec": {"replicas": 2}}, True),
            ({"spec": {"paused": True}}, True),
            ({"replicas": 2}, True),
            ({"replicas": 0}, False),
            ({"unavailableReplicas": 2}, True),
            ({"observedGeneration": 0, "replicas": 0, "unavailableReplicas": 0}, False),
            ({"readyReplicas": 1}, True),
            ({"availableReplicas": 1, "unavailableReplicas": 0}, True),
            ({"conditions": [{"type": "ReplicaFailure", "status": "True"}]}, True),
            ({"conditions": [{"type": "Progressing", "status": "False"}]}, True),
            ({"conditions": [{"type": "Progressing", "status": "True"}]}, False),
        ],
        ids=lambda value: str(value) if isinstance(value, dict) else "",
    )
    def test_deployment_without_ready_pods_is_news_if_more_than_its_counts_changed(
        self, changes: dict[str, Any], *, is_news: bool
    ) -> None:
        before, now = {self.DEPLOYMENT: self.deployment()}, {self.DEPLOYMENT: self.deployment(**changes)}
        assert only_startup_changes(KEY, before, now) != is_news
        assert only_startup_changes(KEY, now, before) != is_news
        assert not only_startup_changes(KEY, {}, now), "a new Deployment is news"

    def test_counts_of_a_paused_deployment_are_news(self) -> None:
        """The status of a paused rollout shows the number of updated engines."""
        paused = {"paused": True}
        before, now = self.deployment(paused), self.deployment(paused, updatedReplicas=1)
        assert not only_startup_changes(KEY, {self.DEPLOYMENT: before}, {self.DEPLOYMENT: now})

    def test_pods_that_are_no_engines_are_news_and_do_not_count(self) -> None:
        reader = {"metadata": {"name": "reader"}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}
        counted, starting = self.deployment(readyReplicas=1), self.pod(self.SCHEDULED)
        before = {self.DEPLOYMENT: counted, self.POD: starting}
        assert not only_startup_changes(KEY, before, {**before, ("Pod", "reader"): self.pod({}, ownerReferences=[])})
        before[("Pod", "reader")] = reader
        assert not only_startup_changes(KEY, before, {**before, self.POD: self.ready()})
        leaving = self.pod(self.ready()["status"], deletionTimestamp="2026-01-01T00:00:00Z")
        before[("Pod", "reader")] = leaving
        assert not only_startup_changes(KEY, before, {**before, self.POD: self.ready()})

    def test_steps_after_a_failed_pod_are_news(self) -> None:
        """These steps show that the kubelet accepted the replacement pod."""
        failed = {("Pod", "llama-0"): self.pod({"phase": "Failed"})}
        before = {self.DEPLOYMENT: self.deployment(), self.POD: self.pod(self.SCHEDULED), **failed}
        running = self.pod({"phase": "Running", "containerStatuses": [{"name": "engine", "state": {"running": {}}}]})
        assert only_startup_changes(KEY, before, copy.deepcopy(before))
        assert not only_startup_changes(KEY, before, {**before, self.POD: running})

    def test_steps_of_groups_are_news(self) -> None:
        groups = {("LeaderWorkerSet", "llama"): {"metadata": {"name": "llama"}}}
        assert not only_startup_changes(KEY, groups, {**groups, self.POD: self.pod(self.SCHEDULED)})
