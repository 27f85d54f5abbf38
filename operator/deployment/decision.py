"""Decides, from all that is known of one object, what should exist.

No I/O: the reconciler brings what it saw and carries out what is decided.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.status import PlanStatus
from specdecode_operator.deployment.conditions import FALSE, TRUE, UNKNOWN, ConditionUpdate
from specdecode_operator.deployment.desired_state import DesiredState, Launch, NotLaunched
from specdecode_operator.deployment.models.download import commits_read, download_first, downloaded, wanted_downloads
from specdecode_operator.deployment.models.model_facts import facts_entry, read_entries
from specdecode_operator.deployment.models.reading import reading_jobs, reading_trouble, what_was_read
from specdecode_operator.deployment.objects.children import render_children, render_plan
from specdecode_operator.deployment.plan.planning import WaitingForNodes, full_matrix, make_plan, passed_over
from specdecode_operator.deployment.plan.status import plan_status, planned_condition
from specdecode_operator.deployment.pods.readiness import stalled, without_engines, working
from specdecode_operator.deployment.spec.facts import Facts
from specdecode_operator.deployment.spec.model_sources import KnownModels, ModelSource, undescribed_models
from specdecode_operator.deployment.spec.parent import Parent, parse_spec
from specdecode_operator.deployment.spec.validation import (
    check_without_models,
    refuse_group_name,
    refuse_host_paths,
    valid_facts,
)
from specdecode_operator.deployment.spec.warnings import plan_warnings
from specdecode_operator.kube.nodes import NodeFacts
from specdecode_operator.problems import InvalidSpecError
from specdecode_operator.sizing.choice.matrix import MatrixRow
from specdecode_operator.sizing.choice.plan import Plan
from specdecode_operator.sizing.pair.calibration import UNCALIBRATED, Calibration

_ACCEPTED = ConditionUpdate("Accepted", TRUE, "Valid", "the spec holds together")


@dataclass(frozen=True)
class _Planned:
    """A spec with its plan, and what there is to say of it before anything runs."""

    parent: Parent
    facts: Facts
    plan: Plan
    matrix: tuple[MatrixRow, ...]
    finding: ConditionUpdate
    told: PlanStatus

    @property
    def conditions(self) -> list[ConditionUpdate]:
        """The conditions that come before those of engines."""
        return [_ACCEPTED, self.finding]

    @property
    def rendered(self) -> Body:
        """The ConfigMap with the plan."""
        return render_plan(self.parent.key, self.parent.uid, self.plan, self.matrix)


def learn(parent: Parent, entries: Mapping[str, str], pods: Sequence[Body]) -> dict[str, str]:
    """Return what the object's pods have found out of its models and the entries do not hold yet, as entries."""
    try:
        spec = parse_spec(parent.spec)
    except InvalidSpecError:
        return {}
    lacking = _lacking(spec, read_entries(spec, entries))
    return {source.key: facts_entry(source, found) for source, found in what_was_read(pods, lacking).items()}


def intend(  # noqa: PLR0913  all that a decision depends on
    parent: Parent,
    nodes: tuple[NodeFacts, ...],
    entries: Mapping[str, str] = MappingProxyType({}),
    pods: Sequence[Body] = (),
    calibration: Calibration = UNCALIBRATED,
    *,
    downloads: Mapping[str, str] = MappingProxyType({}),
    host_paths: tuple[str, ...] = (),
    groups: bool = False,
) -> DesiredState:
    """Decide what should exist for a spec.

    ``entries`` are facts of models that were read in its namespace, ``pods``
    its own, some of which may be reading a model or downloading one;
    ``calibration`` is what measurements say of the estimates, ``downloads``
    what is in its cache, ``host_paths`` what may be mounted of nodes;
    ``groups`` says whether the cluster has LeaderWorkerSets.
    """
    try:
        spec = parse_spec(parent.spec)
        refuse_host_paths(spec, host_paths)
        known = read_entries(spec, entries)
        if lacking := _lacking(spec, known):
            return _read_first(parent, spec, lacking, pods)
        facts = valid_facts(spec, known, calibration)
        plan = make_plan(facts, nodes, parent.status.plan, groups=groups)
        if isinstance(plan, WaitingForNodes):
            return _wait_for_nodes(parent, facts, plan)
        refuse_group_name(parent.key, plan.chosen.nodes)
    except InvalidSpecError as error:
        return _not_accepted(error)
    planned = _planned(parent, facts, plan, nodes, known)
    if planned.finding.status is FALSE:
        return _does_not_fit(planned)
    commits = {**downloads, **commits_read(pods, wanted_downloads(planned.facts.spec))}
    return _download_first(planned, commits, pods) or _launch(planned, commits)


def _lacking(spec: SpecDecodeDeploymentSpec, known: KnownModels) -> dict[str, ModelSource]:
    """Models that nobody describes and that were not read yet, by the field that names them."""
    sources = undescribed_models(spec)
    return {field: source for field, source in sources.items() if source not in known}


def _read_first(
    parent: Parent, spec: SpecDecodeDeploymentSpec, lacking: Mapping[str, ModelSource], pods: Sequence[Body]
) -> DesiredState:
    """Have models read that nobody describes; the plan comes after that."""
    jobs = reading_jobs(parent.key, parent.uid, spec, check_without_models(spec, lacking), lacking)
    models = " and ".join(map(str, dict.fromkeys(lacking.values())))
    names = " and ".join(job["metadata"]["name"] for job in jobs)
    reading = f"Job {names} reads config.json and safetensors headers of {models}"
    accepted = ConditionUpdate("Accepted", UNKNOWN, "ResolvingModel", "the rest is checked once the models are known")
    trouble = reading_trouble(pods, lacking)
    if trouble is None:
        summary, planned = (
            working("ResolvingModel", reading),
            ConditionUpdate("Planned", UNKNOWN, "ResolvingModel", reading),
        )
    elif trouble.permanent:
        summary = stalled(trouble.reason, trouble.message)
        planned = ConditionUpdate("Planned", FALSE, trouble.reason, trouble.message)
    else:
        summary = working(trouble.reason, trouble.message)
        planned = ConditionUpdate("Planned", UNKNOWN, "ResolvingModel", trouble.message)
    summary = without_engines(spec) or summary
    return DesiredState(NotLaunched(summary, parent.status.plan), [accepted, planned], jobs)


def _not_accepted(error: InvalidSpecError) -> DesiredState:
    """Only another spec goes on from here."""
    accepted = ConditionUpdate("Accepted", FALSE, error.reason, str(error))
    planned = ConditionUpdate("Planned", FALSE, "NotAccepted", "the spec is not accepted")
    return DesiredState(NotLaunched(stalled(error.reason, str(error))), [accepted, planned])


def _wait_for_nodes(parent: Parent, facts: Facts, waiting: WaitingForNodes) -> DesiredState:
    """Show the last plan while the nodes that it was made for are away."""
    planned = ConditionUpdate("Planned", UNKNOWN, waiting.reason, waiting.message)
    summary = without_engines(facts.spec) or working(waiting.reason, waiting.message)
    return DesiredState(NotLaunched(summary, parent.status.plan), [_ACCEPTED, planned])


def _planned(parent: Parent, facts: Facts, plan: Plan, nodes: tuple[NodeFacts, ...], known: KnownModels) -> _Planned:
    """Settle the facts on what the plan chose, and say what the plan is and what may be wrong with the models."""
    matrix = full_matrix(facts, nodes, plan)
    facts = facts.at(plan.chosen.target_precision, plan.chosen.draft_precision)
    finding = planned_condition(facts, plan, passed_over(facts, nodes))
    warnings = plan_warnings(facts, known, plan.chosen.tensor)
    finding = replace(finding, message="; ".join([finding.message, *warnings]))
    return _Planned(parent, facts, plan, matrix, finding, plan_status(facts, plan))


def _does_not_fit(planned: _Planned) -> DesiredState:
    """Launch nothing; the plan tells what would."""
    summary = stalled(planned.finding.reason, planned.finding.message)
    return DesiredState(NotLaunched(summary, planned.told), planned.conditions, [planned.rendered])


def _download_first(planned: _Planned, commits: Mapping[str, str], pods: Sequence[Body]) -> DesiredState | None:
    """Have models fetched to the cache that engines read; None when all of them are there."""
    on_the_way = download_first(planned.parent.key, planned.parent.uid, planned.facts, commits, pods)
    if on_the_way is None:
        return None
    summary, jobs = on_the_way
    return DesiredState(NotLaunched(summary, planned.told), planned.conditions, [planned.rendered, *jobs])


def _launch(planned: _Planned, commits: Mapping[str, str]) -> DesiredState:
    """Put the plan in force."""
    key, uid, plan = planned.parent.key, planned.parent.uid, planned.plan
    facts, kept_commits = downloaded(key, uid, planned.facts, commits)
    children = [*kept_commits, *render_children(key, uid, facts, plan, planned.matrix)]
    return DesiredState(Launch(facts, plan, planned.told), planned.conditions, children)
