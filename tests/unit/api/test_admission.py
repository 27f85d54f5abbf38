"""Offline, an object is refused exactly where the API server refuses it, and with the same words.

That a real API server does so is shown for the same objects in tests/component/admission/test_crd_rejections.py and
test_crd_behaviour.py.
"""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from specdecode_operator.api.crd_validation import as_stored, evaluator, object_problems
from specdecode_operator.api.crds import deployment_crd
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.deployment_rules import RULES, Rule
from specdecode_operator.api.spec_problems import spec_problems
from specdecode_operator.problems import Problem
from tests.component.admission.acceptance_cases import GOOD
from tests.component.admission.bad_spec import Bad
from tests.component.admission.rejection_cases import BAD
from tests.support.objects import Body


def parsed(text: str) -> SpecDecodeDeploymentSpec:
    return SpecDecodeDeploymentSpec.model_validate({"target": {"model": "org/target"}} | yaml.safe_load(text))


def refused(text: str) -> tuple[list[Problem], bool]:
    """What is wrong with a spec, and whether each of its fields is good."""
    try:
        return object_problems(parsed(text)), True
    except ValidationError as error:
        return spec_problems(error), False


def own_words(fix: str) -> list[str]:
    """What is said offline of a type or a bound, for which the API server has words of its own."""
    if fix.startswith("was renamed to"):
        return [fix]
    for theirs, ours in OWN_WORDS.items():
        if found := re.fullmatch(theirs, fix):
            return [ours.format(*(f"{int(number):,}" for number in found.groups()))]
    return [f"'{name}'" for name in re.findall(r'"([^"]+)"', fix.rpartition(":")[2])]


OWN_WORDS = {
    "Required": "is missing",
    "should match": "must match the pattern",
    "integer": "must be a whole number",
    "boolean": "must be true or false",
    "string": "must be text: put it in quotes",
    r"at least (\d+) char": "must have {} characters or more",
    r"at least (\d+) items": "must have {} entries or more",
    r"greater than or equal to (\d+)": "must be at least {}",
    r"(?:less than or )?equal to (\d+)": "must be at most {}",
}
"""By the API server's words; it names the values of an enumeration, which are the same in both."""


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_spec_refused_by_the_api_server_is_refused_with_field_and_fix(bad: Bad) -> None:
    problems, fields_are_good = refused(bad.spec)
    blamed = [problem for problem in problems if problem.field == bad.field]
    assert blamed, f"{bad.field} is not named in {problems}"
    # What stands alone in the API server's answer has the value before it here.
    words = [re.sub(r"^is \S+, (but |and )?", "", bad.fix)] if fields_are_good else own_words(bad.fix)
    assert words, f"say in OWN_WORDS what is said offline for {bad.fix!r}"
    assert any(all(word in problem.message for word in words) for problem in blamed), problems
    assert not [problem for problem in blamed if problem.message.startswith(f"is {problem.value}")], "said twice"


@pytest.mark.parametrize("spec", GOOD.values(), ids=GOOD)
def test_spec_accepted_by_the_api_server_is_accepted(spec: str) -> None:
    assert object_problems(parsed(spec)) == []


RULE_CASES = [(owner.__name__, rule) for owner, rules in RULES.items() for rule in rules]


@pytest.mark.parametrize(("owner", "rule"), RULE_CASES, ids=[f"{owner}.{rule.field}" for owner, rule in RULE_CASES])
def test_every_rule_has_an_object_that_breaks_it_and_one_that_passes(owner: str, rule: Rule) -> None:
    good, bad = ([evaluator(part)(rule.holds) for part in parts[owner]] for parts in (good_parts(), bad_parts()))
    assert any(good), "no good object in acceptance_cases.py has it"
    assert not all(bad), "no object in rejection_cases.py breaks it"


@cache
def good_parts() -> Mapping[str, list[Body]]:
    """Parts of all good objects, by the name of their model."""
    return parts_by_model(parsed(spec) for spec in GOOD.values())


@cache
def bad_parts() -> Mapping[str, list[Body]]:
    """The same of the bad ones whose fields are good, each for itself."""
    return parts_by_model(parsed(case.spec) for case in BAD.values() if refused(case.spec)[1])


def parts_by_model(models: Iterable[Any]) -> Mapping[str, list[Body]]:
    every = list(models)
    return {owner.__name__: [part for model in every for part in parts(model, owner.__name__)] for owner in RULES}


def parts(model: Any, owner: str) -> list[Body]:
    """The parts of an object that are of one model, as the API server stores them."""
    found = [as_stored(model)] if type(model).__name__ == owner else []
    values = [getattr(model, name) for name in type(model).model_fields]
    nested = [each for value in values for each in (value if isinstance(value, list) else [value])]
    return found + [part for each in nested if hasattr(type(each), "model_fields") for part in parts(each, owner)]


def defaulted(schema: Body, value: Any) -> Any:
    """What the API server makes of a value: its defaults come from the schema."""
    if isinstance(value, list):
        return [defaulted(schema["items"], each) for each in value]
    if not isinstance(value, dict) or "properties" not in schema:
        return value
    with_defaults = {
        name: value.get(name, child.get("default"))
        for name, child in schema["properties"].items()
        if name in value or "default" in child
    }
    return {name: defaulted(schema["properties"][name], part) for name, part in with_defaults.items()}


@cache
def spec_schema() -> dict[str, Any]:
    """The CRD's schema of a spec, which takes a while to make."""
    schema = deployment_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return dict(schema)


@pytest.mark.parametrize("spec", GOOD.values(), ids=GOOD)
def test_rules_see_objects_with_api_server_defaults(spec: str) -> None:
    written = {"target": {"model": "org/target"}} | yaml.safe_load(spec)
    assert as_stored(parsed(spec)) == defaulted(spec_schema(), written)


@pytest.mark.parametrize("name", ["1st", "a" * 53, "a.b"])
def test_object_name_that_is_no_service_name_is_refused(name: str) -> None:
    (problem,) = object_problems(parsed("{}"), {"name": name})
    assert (problem.field, "use at most 52" in problem.message) == ("metadata.name", True)
    assert object_problems(parsed("{}"), {"name": "a" * 52}) == []
