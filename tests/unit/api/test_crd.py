"""The CRDs are up to date, structural and bounded."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import StringConstraints, ValidationError

from specdecode_operator.api.base import MEANINGS, ApiModel
from specdecode_operator.api.capture_rules import CAPTURE_RULES
from specdecode_operator.api.crds import crds
from specdecode_operator.api.deployment_rules import RULES, Rule
from specdecode_operator.api.spec_problems import spec_problems
from specdecode_operator.api.training_rules import TRAINING_RULES
from specdecode_operator.cli.operator import crds_command

CHECKED_IN = Path(__file__).parents[3] / "crds"
# The API server bounds these itself.
TYPE_META = {"apiVersion", "kind"}


@cache
def schemas() -> tuple[tuple[str, dict[str, Any]], ...]:
    """Every schema of the CRDs with its path."""
    versions = [version for crd in crds() for version in crd["spec"]["versions"]]
    assert len(versions) == 3
    return tuple(each for version in versions for each in walk("", version["schema"]["openAPIV3Schema"]))


def walk(path: str, schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """A schema and all below it."""
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from walk(f"{path}.{name}", child)
    if "items" in schema:
        yield from walk(f"{path}[]", schema["items"])


def test_checked_in_crds_match_the_models(tmp_path: Path) -> None:
    crds_command(tmp_path)
    written = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert set(written) == {file.name for file in CHECKED_IN.glob("*_*.yaml")}
    for name, text in written.items():
        assert (CHECKED_IN / name).read_text() == text, "stale: run `./just crds` and commit it"


def test_schema_is_structural() -> None:
    for path, schema in schemas():
        assert "type" in schema, f"{path} has no type"
        foreign = {"$ref", "$defs", "anyOf", "allOf", "oneOf", "title", "additionalProperties", "nullable"} & set(
            schema
        )
        assert not foreign, f"{path} has {foreign}"
        assert schema.get("default", "") is not None, f"{path} has a null default"


def test_every_schema_node_is_bounded() -> None:
    """CEL rules over what is not bounded are too costly for the API server."""
    for path, schema in schemas():
        match schema["type"]:
            case "string" if path.removeprefix(".") not in TYPE_META:
                assert "maxLength" in schema or "enum" in schema, f"{path} has no maxLength"
            case "array":
                assert "maxItems" in schema, f"{path} has no maxItems"
            case "object" if "properties" not in schema:
                assert "maxProperties" in schema, f"{path} has no maxProperties"
            case "integer":
                assert schema["format"] == "int64", f"{path} is no int64"
            case "number":
                pytest.fail(f"{path} is a float: use integer percent or a decimal string")


def test_every_field_of_the_spec_is_described() -> None:
    for path, schema in schemas():
        if path.startswith(".spec") and not path.endswith("[]"):
            assert schema.get("description"), f"{path} has no description"


def test_description_states_a_default_that_the_schema_omits() -> None:
    found = dict(schemas())
    quantization = found[".spec.arms[].speculation.draft.quantization"]
    assert "default" not in quantization, "server-side apply compares the list as a whole"
    assert quantization["description"].endswith(" Defaults to AsCheckpoint.")
    filled_in = found[".spec.speculation.draft.quantization"]
    assert (filled_in["default"], "Defaults to" in filled_in["description"]) == ("AsCheckpoint", False)


def test_each_part_of_a_status_has_one_writer_so_that_managed_fields_stay_short() -> None:
    atomic = set()
    for path, schema in schemas():
        if path.startswith(".status.") and path.count(".") == 2 and not path.endswith("[]"):
            part = schema["items"] if schema.get("x-kubernetes-list-type") == "map" else schema
            if part["type"] == "object":
                atomic.add((path, part.get("x-kubernetes-map-type") == "atomic"))
    assert {path for path, is_atomic in atomic if is_atomic} >= {".status.conditions", ".status.plan", ".status.head"}
    assert [path for path, is_atomic in atomic if not is_atomic] == [".status.kopf"], "kopf merges its own fields"


def test_every_list_has_a_merge_type() -> None:
    kinds = {(path, schema["x-kubernetes-list-type"]) for path, schema in schemas() if schema["type"] == "array"}
    assert {path for path, kind in kinds if kind == "map"} == {
        ".spec.adapters",
        ".spec.engine.env",
        ".spec.engine.replay.acceptance",
        ".spec.expose.httpRoute.matches[].headers",
        ".spec.target.checkpoints",
        ".spec.speculation.draft.checkpoints",
        ".status.policy.speculation.draft.checkpoints",
        ".spec.captures",
        ".spec.captures[].template.arms[].speculation.draft.checkpoints",
        ".spec.arms[].speculation.draft.checkpoints",
        ".status.comparison.arms",
        ".status.captures",
        ".status.conditions",
        ".status.speculation",
        ".status.figures.values",
        ".status.canary.figures",
    }
    assert {kind for _, kind in kinds} == {"map", "atomic"}


@pytest.mark.parametrize(
    "rule",
    [rule for rules in (*RULES.values(), *CAPTURE_RULES.values(), *TRAINING_RULES.values()) for rule in rules],
    ids=lambda rule: f"{rule.field}: {rule.holds[:60]}",
)
def test_rule_message_says_what_to_write(rule: Rule) -> None:
    validation = rule.as_validation()
    assert "%" not in validation["message"], "it stands alone where a value has a line break"
    assert ("messageExpression" in validation) is bool(rule.values)
    assert ":" in rule.message, "a message is what is wrong, a colon, what to write instead"
    assert rule.message.count("{") == len(rule.values)
    assert "'" not in rule.message, "it would end the CEL text"


def test_every_rule_has_a_message_and_every_pattern_a_meaning() -> None:
    """The API server shows the rule where its message has a line break; plan and lint say what a pattern means."""
    for path, schema in schemas():
        for validation in schema.get("x-kubernetes-validations", []):
            assert validation["message"].strip(), f"{path}: {validation['rule']}"
            assert "\n" not in validation["message"]
        if path.startswith(".spec") and "pattern" in schema:
            assert schema["pattern"] in MEANINGS, f"{path}: say in api/base.py what it means"


@pytest.mark.parametrize("pattern", MEANINGS)
def test_pattern_error_is_in_plain_words(pattern: str) -> None:
    class Model(ApiModel):
        value: Annotated[str, StringConstraints(pattern=pattern)]

    with pytest.raises(ValidationError) as refused:
        Model.parse({"value": "\n"})
    (problem,) = spec_problems(refused.value, Model)
    what, _, fix = problem.message.removeprefix("must match the pattern of ").partition(": ")
    assert what.startswith(("a ", "an "))
    assert fix.startswith(("use ", "write "))
    assert not set(problem.message) & set("^$[](){}+?\\")
