"""What can be said of an object before any cluster has looked at it: the same offline and when it is stored.

Only the object counts, and what whoever runs the operator allows: two who ask get one answer, whichever replica they
ask and whatever nodes there are at the moment.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from specdecode_operator.api.capture import SpecDecodeCaptureSpec, Storage
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.key import Key
from specdecode_operator.capture.control.admission import workload_blocked
from specdecode_operator.deployment.blocked import Blocked
from specdecode_operator.deployment.models.model_facts import SiteFacts, known_checkpoints, site_facts_of
from specdecode_operator.deployment.plan.planning import ASSUMED_GPUS_PER_NODE, assumed_nodes, make_plan
from specdecode_operator.deployment.plan.status import planned_condition
from specdecode_operator.deployment.spec.facts import Facts
from specdecode_operator.deployment.spec.model_sources import NO_MODELS, KnownModels, ModelSource, undescribed_models
from specdecode_operator.deployment.spec.validation import (
    check_without_models,
    refuse_group_name,
    refuse_host_paths,
    refuse_pod_template,
    valid_facts,
)
from specdecode_operator.deployment.spec.warnings import plan_notes, plan_warnings, version_doubts
from specdecode_operator.kube.nodes import NodeFacts
from specdecode_operator.kube.pod_policy import NONE_ALLOWED
from specdecode_operator.kube.storage_classes import StorageClasses
from specdecode_operator.problems import InvalidSpecError, Problem
from specdecode_operator.sizing.base.devices import known_products
from specdecode_operator.sizing.memory.budget import Verdict
from specdecode_operator.sizing.pair.calibration import UNCALIBRATED, Calibration

PLAN_WARNING: Final = "PlanWarning"
PLAN_NOTE: Final = "PlanNote"
"""Rules that are no reason of a condition: what `Planned` mentions."""

_ASSUMED: Final = f"looked at for nodes of {ASSUMED_GPUS_PER_NODE} GPUs, as nobody says which there are: "


class Level(StrEnum):
    """How bad it is, in SARIF's words."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"  # Nothing to mend


@dataclass(frozen=True)
class Remark:
    """One thing that is wrong with an object, or worth knowing of it."""

    level: Level
    rule: str  # The reason that the condition would have
    problem: Problem  # Without field and value where none is meant

    @property
    def sentence(self) -> str:
        """What to tell, on one line and without a full stop."""
        return str(self.problem) if self.problem.field else self.problem.message


@dataclass(frozen=True)
class Terms:
    """What whoever runs the operator says of all objects."""

    host_paths: tuple[str, ...] = ()
    """Directories of nodes that may be mounted."""

    pod_template: frozenset[str] = NONE_ALLOWED
    """What podTemplate may ask for beyond `kube/pod_policy.py`, by name."""

    does_not_fit: bool = True
    """What fits nowhere is told; else it is refused."""

    nodes: tuple[NodeFacts, ...] | None = None
    """The fleet. None: nodes of the products that an object names, or of all that are known."""

    calibration: Calibration = UNCALIBRATED
    """What measurements say of the estimates."""

    site_facts: Mapping[str, SiteFacts] = field(default_factory=dict)
    """Facts about models that the catalogue lacks, by model id."""

    storage_classes: StorageClasses | None = None
    """Those of the cluster. None: unknown, so that no claim is warned of."""


def deployment_remarks(
    key: Key,
    spec: SpecDecodeDeploymentSpec,
    terms: Terms,
    known: KnownModels = NO_MODELS,
    *,
    unknown: Mapping[str, ModelSource] | None = None,
) -> Iterator[Remark]:
    """What the operator would refuse in a SpecDecodeDeployment or mention of it, errors first.

    ``known`` are models that were read, ``unknown`` those that could not be, by field; None: all that neither the spec,
    the catalogue nor the operator's facts files describe.
    """
    for schedule in spec.captures:
        where = f"spec.captures[name={schedule.name}].template.storage"
        yield from _of_storage(schedule.template.storage, where, terms)
    yield from _refused(lambda: refuse_host_paths(spec, terms.host_paths))
    yield from _refused(lambda: refuse_pod_template(spec, terms.pod_template, key.namespace))
    try:
        known = {**known, **known_checkpoints(spec, {}, site_facts_of(spec, terms.site_facts))}
        if unknown is None:
            unknown = {field: source for field, source in undescribed_models(spec).items() if source not in known}
        if unknown:
            profile = check_without_models(spec, unknown)
            yield from (Remark(Level.WARNING, PLAN_WARNING, doubt) for doubt in version_doubts(spec, profile))
            return
        facts = valid_facts(spec, known, terms.calibration)
        yield from _of_plan(key, facts, terms, known)
    except InvalidSpecError as error:
        yield from refusals(error)


def capture_remarks(spec: SpecDecodeCaptureSpec, terms: Terms) -> Iterator[Remark]:
    """Yield what the operator would refuse in a SpecDecodeCapture or warn of, whatever deployment it is of."""
    if blocked := workload_blocked(spec):
        yield Remark(Level.ERROR, blocked.reason, Problem("", "", blocked.message))
    yield from _of_storage(spec.storage, "spec.storage", terms)


def _of_storage(storage: Storage, where: str, terms: Terms) -> Iterator[Remark]:
    """Yield that the cluster lacks the StorageClass of a claim that a capture creates. It may still be created."""
    if terms.storage_classes is None or storage.existing_claim is not None:
        return
    missing = terms.storage_classes.missing(storage.storage_class_name)
    if missing is not None:
        fix = "name another one, or create it before the capture starts"
        value = storage.storage_class_name or "not set"
        problem = Problem(f"{where}.storageClassName", value, f"{missing}: {fix}")
        yield Remark(Level.WARNING, "StorageClassNotFound", problem)


def _refused(check: Callable[[], None]) -> Iterator[Remark]:
    try:
        check()
    except InvalidSpecError as error:
        yield from refusals(error)


def refusals(error: InvalidSpecError) -> Iterator[Remark]:
    """Each problem of a spec as a remark."""
    return (Remark(Level.ERROR, error.reason, problem) for problem in error.problems)


def _of_plan(key: Key, facts: Facts, terms: Terms, known: KnownModels) -> Iterator[Remark]:
    nodes = terms.nodes
    if nodes is None:
        nodes = assumed_nodes(facts, facts.spec.accelerator.product or known_products())
    plan = make_plan(facts, nodes, None, groups=True)
    too_large = Level.WARNING if terms.does_not_fit else Level.ERROR
    if isinstance(plan, Blocked):
        # Nodes may come: only what is certain is refused.
        assumed = _ASSUMED if terms.nodes is None else ""
        yield Remark(Level.WARNING, plan.reason, Problem("", "", f"{assumed}{plan.message}"))
        tensor = facts.spec.parallelism.tensor or facts.spec.parallelism.draft_tensor or 1
    else:
        refuse_group_name(key, facts.takes_pods_of(plan))
        tensor = plan.chosen.tensor
        verdict = planned_condition(facts, plan)
        if verdict.reason != Verdict.FITS:
            level = too_large if verdict.reason == Verdict.DOES_NOT_FIT else Level.WARNING
            yield Remark(level, verdict.reason, Problem("", "", verdict.message))
        facts = facts.at(*plan.chosen.served)
    # Those that have a field have a line, too.
    doubts = {str(doubt): doubt for doubt in version_doubts(facts.spec, facts.profile)}
    for warning in plan_warnings(facts, known, tensor):
        yield Remark(Level.WARNING, PLAN_WARNING, doubts.get(warning, Problem("", "", warning)))
    for note in plan_notes(facts):
        yield Remark(Level.NOTE, PLAN_NOTE, Problem("", "", note))
