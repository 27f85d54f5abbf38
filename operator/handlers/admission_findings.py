"""Check an object without a cluster, for `specdecode lint` and for the webhook.

Findings depend only on the object and on the operator's settings, not on nodes. All replicas and `specdecode lint`
therefore agree. `Policies` evaluates ValidatingAdmissionPolicies offline as the API server does, for `lint`:
https://kubernetes.io/docs/reference/access-authn-authz/validating-admission-policy/
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, Final

from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import SpecDecodeCaptureSpec, Storage
from specdecode_operator.api.crd_validation import CelError, evaluator
from specdecode_operator.api.deployment import Key, SpecDecodeDeploymentSpec
from specdecode_operator.api.training import SpecDecodeTrainingSpec
from specdecode_operator.capture.preconditions import workload_blocked
from specdecode_operator.cluster.device_slices import DeviceInventory
from specdecode_operator.cluster.nodes import NodeFacts
from specdecode_operator.cluster.storage_classes import StorageClasses
from specdecode_operator.deployment.conditions import Blocked
from specdecode_operator.deployment.models.model_facts import SiteFacts, known_checkpoints, site_facts_of
from specdecode_operator.deployment.models.model_locations import (
    NO_MODELS,
    KnownModels,
    ModelSource,
    meant_model,
    undescribed_models,
)
from specdecode_operator.deployment.planning import (
    ASSUMED_GPUS_PER_NODE,
    assumed_nodes,
    make_plan,
    planned_condition,
    without_devices,
)
from specdecode_operator.deployment.pod_security import NONE_ALLOWED
from specdecode_operator.deployment.request_lengths import schedule_doubts
from specdecode_operator.deployment.resource_claim import usable_gpus
from specdecode_operator.deployment.spec_facts import Facts
from specdecode_operator.deployment.validation import (
    check_without_models,
    refuse_group_name,
    refuse_host_paths,
    refuse_pod_template,
    valid_facts,
)
from specdecode_operator.deployment.warnings import plan_notes, plan_warnings, size_doubts, spec_doubts, token_doubts
from specdecode_operator.problems import InvalidSpecError, Problem, printable
from specdecode_operator.sizing.calibration import UNCALIBRATED, Calibration
from specdecode_operator.sizing.devices import known_products
from specdecode_operator.sizing.memory.budget import Verdict
from specdecode_operator.training.refresh_cost import planned_refreshes
from specdecode_operator.untrusted import mapping, objects, texts

PLAN_WARNING: Final = "PlanWarning"
PLAN_NOTE: Final = "PlanNote"
"""Rule of a finding that no condition reports."""

_ASSUMED: Final = f"checked for nodes with {ASSUMED_GPUS_PER_NODE} GPUs, because the nodes are unknown: "


class Level(StrEnum):
    """Severity, as SARIF names it."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"  # No fix needed


@dataclass(frozen=True)
class Remark:
    """A finding about an object."""

    level: Level
    rule: str  # Reason of the condition that would report it
    problem: Problem  # Field and value may be empty

    @property
    def sentence(self) -> str:
        """Finding as one line without a full stop."""
        return str(self.problem) if self.problem.field else self.problem.message


@dataclass(frozen=True)
class Terms:
    """Settings of the operator that apply to all objects."""

    host_paths: tuple[str, ...] = ()
    """Node directories from which objects may mount models."""
    pod_template: frozenset[str] = NONE_ALLOWED
    """Names of settings that podTemplate may have although `deployment/pod_security.py` forbids them."""
    does_not_fit: bool = True
    """Whether a plan that does not fit is a warning instead of an error."""
    nodes: tuple[NodeFacts, ...] | None = None
    """Nodes to plan for. None: nodes of the products that an object names, or of all known products."""
    devices: DeviceInventory | None = None
    """Devices to plan for if an object claims its GPUs. None: those of the nodes."""
    calibration: Calibration = UNCALIBRATED
    site_facts: Mapping[str, SiteFacts] = field(default_factory=dict)
    """Facts about models that the catalogue lacks, by model id."""
    storage_classes: StorageClasses | None = None
    """StorageClasses of the cluster. None: unknown."""


def deployment_remarks(
    key: Key,
    spec: SpecDecodeDeploymentSpec,
    terms: Terms,
    known: KnownModels = NO_MODELS,
    *,
    unknown: Mapping[str, ModelSource] | None = None,
) -> Iterator[Remark]:
    """Yield the findings about a SpecDecodeDeployment, errors first.

    ``known`` has the models that were read. ``unknown`` has the models that could not be read, by field; None stands
    for all models that the spec, the catalogue and the operator's facts files do not describe.
    """
    for schedule in spec.captures:
        where = f"spec.captures[name={schedule.name}]"
        yield from _of_storage(schedule.template.storage, f"{where}.template.storage", terms)
        if schedule.training is not None:
            storage = schedule.training.template.storage
            yield from _of_storage(storage, f"{where}.training.template.storage", terms, "training")
    for check in (
        partial(refuse_host_paths, spec, terms.host_paths),
        partial(refuse_pod_template, spec, terms.pod_template, key.namespace),
    ):
        try:
            check()
        except InvalidSpecError as error:
            yield from refusals(error)
    misspelt: tuple[Problem, ...] = ()  # The caller reports unknown models that it passes
    try:
        known = {**known, **known_checkpoints(spec, {}, site_facts_of(spec, terms.site_facts))}
        if unknown is None:
            unknown = {field: source for field, source in undescribed_models(spec).items() if source not in known}
            misspelt = tuple(_misspelt_names(unknown))
        if unknown:
            profile = check_without_models(spec, unknown)
            doubts = (*misspelt, *spec_doubts(spec, profile), *token_doubts(spec))
            yield from (Remark(Level.WARNING, PLAN_WARNING, doubt) for doubt in doubts)
            return
        yield from _of_plan(key, valid_facts(spec, known, terms.calibration), terms, known)
    except InvalidSpecError as error:
        yield from refusals(error)


def _misspelt_names(unknown: Mapping[str, ModelSource]) -> Iterator[Problem]:
    """Yield each unknown model whose name is close to one of the catalogue."""
    for path, source in unknown.items():
        if meant := meant_model(path, source):
            yield Problem(f"{path}.model", source.model, f"is not in the catalogue; did you mean {meant}?")


def capture_remarks(spec: SpecDecodeCaptureSpec, terms: Terms) -> Iterator[Remark]:
    """Yield the findings about a SpecDecodeCapture that do not depend on its deployment."""
    if blocked := workload_blocked(spec):
        yield Remark(Level.ERROR, blocked.reason, Problem("", "", blocked.message))
    yield from _of_storage(spec.storage, "spec.storage", terms)


def training_remarks(spec: SpecDecodeTrainingSpec, terms: Terms) -> Iterator[Remark]:
    """Yield the findings about a SpecDecodeTraining that do not depend on its deployment."""
    yield from _of_storage(spec.storage, "spec.storage", terms, "training")


def _of_storage(storage: Storage, where: str, terms: Terms, kind: str = "capture") -> Iterator[Remark]:
    """Yield a warning if the cluster lacks the StorageClass of a claim to create."""
    if terms.storage_classes is None or storage.existing_claim is not None:
        return
    missing = terms.storage_classes.missing(storage.storage_class_name)
    if missing is not None:
        fix = f"name another one, or create it before the {kind} starts"
        value = storage.storage_class_name or "not set"
        problem = Problem(f"{where}.storageClassName", value, f"{missing}: {fix}")
        yield Remark(Level.WARNING, "StorageClassNotFound", problem)


def refusals(error: InvalidSpecError) -> Iterator[Remark]:
    """Return each problem of a spec as a remark."""
    return (Remark(Level.ERROR, error.reason, problem) for problem in error.problems)


def _of_plan(key: Key, facts: Facts, terms: Terms, known: KnownModels) -> Iterator[Remark]:
    nodes = terms.nodes
    if nodes is None:
        nodes = assumed_nodes(facts, facts.spec.accelerator.products or known_products())
    else:
        nodes = usable_gpus(facts.spec, nodes, terms.devices)
    plan = make_plan(facts, nodes, None, groups=True)
    too_large = Level.WARNING if terms.does_not_fit else Level.ERROR
    if isinstance(plan, Blocked):
        # This is not an error, because nodes may be added.
        blocked = plan if terms.nodes is None else without_devices(facts.spec, plan, terms.devices)
        assumed = _ASSUMED if terms.nodes is None else ""
        yield Remark(Level.WARNING, blocked.reason, Problem("", "", f"{assumed}{blocked.message}"))
        tensor = facts.spec.parallelism.tensor or facts.spec.parallelism.draft_tensor or 1
    else:
        refuse_group_name(key, facts.takes_pods_of(plan))
        tensor = plan.chosen.tensor
        verdict = planned_condition(facts, plan)
        if verdict.reason != Verdict.FITS:
            level = too_large if verdict.reason == Verdict.DOES_NOT_FIT else Level.WARNING
            yield Remark(level, verdict.reason, Problem("", "", verdict.message))
        for refresh in planned_refreshes(key, facts, plan):
            if refresh.problem is None:
                yield Remark(Level.NOTE, PLAN_NOTE, Problem("", "", refresh.note))
            else:
                # The plan may be for other GPUs than the cluster's.
                yield Remark(Level.ERROR if refresh.is_certain else too_large, refresh.reason, refresh.problem)
        facts = facts.at(*plan.chosen.served)
    # Warnings have a field, so `lint` can name its line in the file.
    with_fields = (*spec_doubts(facts.spec, facts.profile), *size_doubts(facts), *schedule_doubts(facts))
    doubts = {str(doubt): doubt for doubt in with_fields}
    for warning in plan_warnings(facts, known, tensor):
        yield Remark(Level.WARNING, PLAN_WARNING, doubts.get(warning, Problem("", "", warning)))
    yield from (Remark(Level.WARNING, PLAN_WARNING, doubt) for doubt in token_doubts(facts.spec))
    for note in plan_notes(facts):
        yield Remark(Level.NOTE, PLAN_NOTE, Problem("", "", note))


RULE: Final = "AdmissionPolicy"
_NAME_LABEL: Final = "kubernetes.io/metadata.name"
_LEVELS: Final = {"Deny": Level.ERROR, "Warn": Level.WARNING, "Audit": Level.NOTE}
_POLICY: Final = "ValidatingAdmissionPolicy"
_BINDING: Final = "ValidatingAdmissionPolicyBinding"


@dataclass(frozen=True)
class Policies:
    """ValidatingAdmissionPolicies of a chart or a cluster, with the objects that they refer to."""

    policies: Mapping[str, Body]
    bindings: Sequence[Body]
    parameters: Mapping[tuple[str, str], Body]
    """ConfigMaps by namespace and name."""

    namespaces: Mapping[str, Body]

    @classmethod
    def of(cls, found: Sequence[Body]) -> "Policies":
        """Return the policies among some objects; ignore other kinds."""
        kinds: dict[str, list[Body]] = {}
        for each in found:
            kinds.setdefault(str(each.get("kind")), []).append(each)
        return cls(
            {_name(each): each for each in kinds.get(_POLICY, [])},
            kinds.get(_BINDING, []),
            {(_namespace(each), _name(each)): each for each in kinds.get("ConfigMap", [])},
            {_name(each): each for each in kinds.get("Namespace", [])},
        )

    def remarks(self, body: Body, resource: str) -> Iterator[Remark]:
        """Yield the findings about an object that is created; ``resource`` is its kind in URLs, such as pods."""
        for binding in self.bindings:
            spec = mapping(binding, "spec")
            policy = self.policies.get(str(spec.get("policyName")))
            if policy is None:
                continue
            # A binding narrows the matches of its policy.
            matches = [mapping(mapping(policy, "spec"), "matchConstraints"), mapping(spec, "matchResources")]
            if not (objects(matches[0], "resourceRules") and all(_is_about(each, body, resource) for each in matches)):
                continue
            selected = [self._selects(each, mapping(body, "metadata").get("namespace")) for each in matches]
            if False not in selected:
                yield from self._judged(policy, spec, body, certain=None not in selected)

    def _selects(self, match: Body, namespace: Any) -> bool | None:
        """Return whether a binding selects a namespace; None if that depends on unknown labels."""
        wanted = _requirements(mapping(match, "namespaceSelector"))
        known = self.namespaces.get(str(namespace))
        labels = {_NAME_LABEL: namespace} if namespace else {}
        if known is not None:
            labels |= mapping(mapping(known, "metadata"), "labels")
        answers = [_holds(each, labels) if known is not None or each.get("key") in labels else None for each in wanted]
        return False if False in answers else None if None in answers else True

    def _judged(self, policy: Body, binding: Body, body: Body, *, certain: bool) -> Iterator[Remark]:
        levels = [_LEVELS[each] for each in texts(binding, "validationActions") if each in _LEVELS]
        level = min(levels, key=list(Level).index, default=Level.ERROR)
        if level is Level.ERROR and not certain:
            level = Level.WARNING
        name = _name(policy)
        reference = mapping(binding, "paramRef")
        parameters = self.parameters.get((str(reference.get("namespace")), str(reference.get("name"))))
        if reference and parameters is None:
            missing = f"ConfigMap {reference.get('name')} of {name} is not among the files, so its limits are unknown"
            yield _remark(Level.WARNING, missing)
            return
        spec = mapping(policy, "spec")
        try:
            broken = [*_broken(spec, body, parameters)]
        except CelError as error:
            yield _remark(Level.WARNING, f"{name} cannot be evaluated here: {error}")
            return
        for message in broken:
            yield _remark(level, message, doubt="" if certain else f"where {name} is bound to its namespace, ")


def _broken(spec: Body, body: Body, parameters: Body | None) -> Iterator[str]:
    """Yield the messages of a policy's validations that fail."""
    given = {"object": body, "oldObject": None, "params": parameters}
    evaluate = evaluator(None, **given)
    if not all(evaluate(str(each.get("expression"))) for each in objects(spec, "matchConditions")):
        return
    variables: Body = {}
    for each in objects(spec, "variables"):
        # The API server evaluates a variable when it is used, so a variable that fails is only missing.
        try:
            variables[str(each.get("name"))] = evaluator(None, **given, variables=variables)(
                str(each.get("expression"))
            )
        except CelError:
            continue
    evaluate = evaluator(None, **given, variables=variables)
    for each in objects(spec, "validations"):
        if evaluate(str(each.get("expression"))):
            continue
        if expression := each.get("messageExpression"):
            yield str(evaluate(str(expression)))
        else:
            yield str(each.get("message") or f"failed expression: {each.get('expression')}")


def _is_about(match: Body, body: Body, resource: str) -> bool:
    """Return whether a match selects an object in any namespace; a match without rules selects all objects."""
    rules, labels = objects(match, "resourceRules"), mapping(mapping(body, "metadata"), "labels")
    return (
        (not rules or any(_is_of(rule, body, resource) for rule in rules))
        and not any(_is_of(rule, body, resource) for rule in objects(match, "excludeResourceRules"))
        and all(_holds(each, labels) for each in _requirements(mapping(match, "objectSelector")))
    )


def _is_of(rule: Body, body: Body, resource: str) -> bool:
    group, _, version = str(body.get("apiVersion")).rpartition("/")
    names = texts(rule, "resourceNames")
    return (
        _names(rule, "apiGroups", group)
        and _names(rule, "apiVersions", version)
        and _names(rule, "resources", resource)
        and _names(rule, "operations", "CREATE")
        and (not names or _name(body) in names)
    )


def _requirements(selector: Body) -> list[Body]:
    labels = mapping(selector, "matchLabels").items()
    return [
        *({"key": key, "operator": "In", "values": [value]} for key, value in labels),
        *objects(selector, "matchExpressions"),
    ]


def _names(rule: Body, field: str, wanted: str) -> bool:
    return not {wanted, "*"}.isdisjoint(texts(rule, field))


def _holds(requirement: Body, labels: Mapping[str, Any]) -> bool:
    key, values = str(requirement.get("key")), texts(requirement, "values")
    match requirement.get("operator"):
        case "In":
            return key in labels and labels[key] in values
        case "NotIn":
            return key not in labels or labels[key] not in values
        case "Exists":
            return key in labels
        case _:
            return key not in labels


def _remark(level: Level, message: str, doubt: str = "") -> Remark:
    # Our messages have the form of a problem, so `lint` can name the line of its field.
    field, _, rest = message.partition(": ")
    value, _, words = rest.partition(": ")
    if field.startswith("spec.") and words:
        return Remark(level, RULE, Problem(field, value, doubt + words))
    return Remark(level, RULE, Problem("", "", printable(doubt + message)))


def _name(body: Body) -> str:
    return str(mapping(body, "metadata").get("name"))


def _namespace(body: Body) -> str:
    return str(mapping(body, "metadata").get("namespace"))
