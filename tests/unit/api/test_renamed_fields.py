"""Old names of fields are rejected with the new name, by the API server and by `lint` and `plan`."""

import pytest

from specdecode_operator.api.crds import deployment_crd
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.renamed_fields import RENAMED, RenamedField
from specdecode_operator.api.spec_problems import admitted_spec
from specdecode_operator.problems import InvalidSpecError
from tests.support.golden import ROOT
from tests.support.objects import Body, pair_70b

CASES = pytest.mark.parametrize("renamed", RENAMED, ids=lambda each: each.old)
VALUES = {"array": ["NVIDIA-H200"], "integer": 90, "string": "Ignore"}


def parent_schema(renamed: RenamedField) -> Body:
    """Return the schema of the object that had the field."""
    (version,) = deployment_crd()["spec"]["versions"]
    found: Body = version["schema"]["openAPIV3Schema"]
    for part in renamed.old.split(".")[:-1]:
        found = found["properties"][part]
    return found


@CASES
def test_the_crd_declares_the_old_name_and_rejects_it(renamed: RenamedField) -> None:
    """The API server would drop a field that is not declared, without an error."""
    schema = parent_schema(renamed)
    assert schema["properties"][renamed.name]["description"] == f"Rejected: renamed to {renamed.new}."
    (rule,) = (each for each in schema["x-kubernetes-validations"] if each["fieldPath"] == f".{renamed.name}")
    assert rule["rule"] == f"!has(self.{renamed.name})"
    assert rule["message"] == f"was renamed to {renamed.new}: {renamed.hint}"


@CASES
def test_both_names_are_in_the_model_that_has_the_field(renamed: RenamedField) -> None:
    aliases = {info.alias for info in renamed.owner.model_fields.values()}
    assert renamed.new.rpartition(".")[2] in aliases
    assert renamed.name not in aliases
    assert renamed.old.rpartition(".")[0] == renamed.new.rpartition(".")[0]
    assert renamed.new.rpartition(".")[2] in parent_schema(renamed)["properties"]


@CASES
def test_lint_and_plan_name_the_new_field(renamed: RenamedField) -> None:
    spec = pair_70b()
    place: Body = {"spec": spec}
    for part in renamed.old.split(".")[:-1]:
        place = place.setdefault(part, {})
    if renamed.owner.__name__ == "Override":
        place["reason"] = "measured"
    place[renamed.name] = VALUES[renamed.schema["type"]]
    with pytest.raises(InvalidSpecError) as rejected:
        admitted_spec(spec)
    assert [(each.field, each.message) for each in rejected.value.problems] == [(renamed.old, renamed.message)]


@CASES
def test_the_reference_lists_an_old_name_only_as_renamed(renamed: RenamedField) -> None:
    text = (ROOT / "docs/reference/deployment-fields.md").read_text()
    assert f"| `{renamed.old}` | `{renamed.new}` | {renamed.hint} |" in text
    assert text.count(renamed.old + "`") == 1
    assert f"\n| `{renamed.name}` |" not in text.partition("## status")[0]


def test_a_field_with_an_old_name_elsewhere_stays_unknown() -> None:
    with pytest.raises(InvalidSpecError, match="is no field of spec"):
        admitted_spec(pair_70b() | {"planning": "Ignore"})
    assert "planning" not in {info.alias for info in SpecDecodeDeploymentSpec.model_fields.values()}
