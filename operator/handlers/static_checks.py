"""ValidatingAdmissionPolicies, evaluated as the API server does: what it would say of an object, told offline.

https://kubernetes.io/docs/reference/access-authn-authz/validating-admission-policy/
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from specdecode_operator.admission.judgement import Level, Remark
from specdecode_operator.api.base import Body
from specdecode_operator.api.crd.cel_expression import CelError, evaluator
from specdecode_operator.kube.untyped import mapping, objects, texts
from specdecode_operator.problems import Problem, printable

RULE: Final = "AdmissionPolicy"
_NAME_LABEL: Final = "kubernetes.io/metadata.name"
_LEVELS: Final = {"Deny": Level.ERROR, "Warn": Level.WARNING, "Audit": Level.NOTE}
_POLICY: Final = "ValidatingAdmissionPolicy"
_BINDING: Final = "ValidatingAdmissionPolicyBinding"

_Evaluate = Callable[[str], Any]


@dataclass(frozen=True)
class Policies:
    """Policies with all that they refer to, as the chart makes them or a cluster has them."""

    policies: Mapping[str, Body]
    bindings: Sequence[Body]
    parameters: Mapping[tuple[str, str], Body]
    """ConfigMaps by namespace and name."""

    namespaces: Mapping[str, Body]

    @classmethod
    def of(cls, found: Sequence[Body]) -> "Policies":
        """Return those among some objects; others are passed over."""
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
        """What they say of an object that is created; ``resource`` is its kind as URLs have it, such as pods."""
        for binding in self.bindings:
            spec = mapping(binding, "spec")
            policy = self.policies.get(str(spec.get("policyName")))
            if policy is None:
                continue
            # A binding narrows what its policy is about.
            matches = [mapping(mapping(policy, "spec"), "matchConstraints"), mapping(spec, "matchResources")]
            if not (objects(matches[0], "resourceRules") and all(_is_about(each, body, resource) for each in matches)):
                continue
            selected = [self._selects(each, mapping(body, "metadata").get("namespace")) for each in matches]
            if False not in selected:
                yield from self._judged(policy, spec, body, certain=None not in selected)

    def _selects(self, match: Body, namespace: Any) -> bool | None:
        """Whether a binding is for a namespace; None where its labels would tell, and are not known."""
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
            missing = f"ConfigMap {reference.get('name')} of {name} is not among the files: its limits are not known"
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
    """What of a policy does not hold, in its words."""
    given = {"object": body, "oldObject": None, "params": parameters}
    evaluate = evaluator(None, **given)
    if not all(evaluate(str(each.get("expression"))) for each in objects(spec, "matchConditions")):
        return
    variables: Body = {}
    for each in objects(spec, "variables"):
        # Those that fail are missed by whoever asks for them, as the API server evaluates none before.
        try:
            variables[_name_of(each)] = evaluator(None, **given, variables=variables)(str(each.get("expression")))
        except CelError:
            continue
    evaluate = evaluator(None, **given, variables=variables)
    for each in objects(spec, "validations"):
        if not evaluate(str(each.get("expression"))):
            yield _words(each, evaluate)


def _words(validation: Body, evaluate: _Evaluate) -> str:
    if expression := validation.get("messageExpression"):
        return str(evaluate(str(expression)))
    return str(validation.get("message") or f"failed expression: {validation.get('expression')}")


def _is_about(match: Body, body: Body, resource: str) -> bool:
    """Whether an object is among those meant, but for its namespace; without rules all are."""
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
    """What a selector of labels asks for."""
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
    """Messages of ours have the form of a problem, whose field has a line."""
    field, _, rest = message.partition(": ")
    value, _, words = rest.partition(": ")
    if field.startswith("spec.") and words:
        return Remark(level, RULE, Problem(field, value, doubt + words))
    return Remark(level, RULE, Problem("", "", printable(doubt + message)))


def _name(body: Body) -> str:
    return str(mapping(body, "metadata").get("name"))


def _namespace(body: Body) -> str:
    return str(mapping(body, "metadata").get("namespace"))


def _name_of(variable: Body) -> str:
    return str(variable.get("name"))
