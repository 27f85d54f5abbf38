"""Old names of fields are rejected with the new name, by the API server and by `lint` and `plan`."""

from functools import cache

import pytest

from specdecode_operator.api.capture import SpecDecodeCaptureSpec
from specdecode_operator.api.crds import capture_crd, deployment_crd
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.renamed_fields import RENAMED, RenamedField
from specdecode_operator.api.spec_problems import admitted_spec, parsed_spec
from specdecode_operator.problems import InvalidSpecError
from tests.support.golden import ROOT
from tests.support.objects import Body, pair_70b

CASES = pytest.mark.parametrize(
    ("renamed", "place"),
    [pytest.param(each, place, id=f"{place}.{each.name}") for each in RENAMED for place in each.places],
)
VALUES = {"array": ["NVIDIA-H200"], "integer": 90, "string": "Ignore"}


def is_of_captures(place: str) -> bool:
    """Whether the object is in a SpecDecodeCapture."""
    return place == "spec.storage"


@cache
def schema(*, of_captures: bool) -> Body:
    """Return the schema of a kind."""
    (version,) = (capture_crd() if of_captures else deployment_crd())["spec"]["versions"]
    found: Body = version["schema"]["openAPIV3Schema"]
    return found


def parent_schema(place: str) -> Body:
    """Return the schema of the object that had the field."""
    found = schema(of_captures=is_of_captures(place))
    for part in place.split("."):
        found = found["properties"][part.removesuffix("[]")]
        found = found["items"] if part.endswith("[]") else found
    return found


@CASES
def test_the_crd_declares_the_old_name_and_rejects_it(renamed: RenamedField, place: str) -> None:
    """The API server would drop a field that is not declared, without an error."""
    schema = parent_schema(place)
    assert schema["properties"][renamed.name]["description"] == f"Rejected: renamed to {renamed.new}."
    rules = [each for each in schema["x-kubernetes-validations"] if each["fieldPath"] == f".{renamed.name}"]
    assert [each["rule"] for each in rules] == [f"!has(self.{renamed.name})"]
    assert [each["message"] for each in rules] == [f"was renamed to {renamed.new}: {renamed.hint}"]


@CASES
def test_model_has_only_the_new_name(renamed: RenamedField, place: str) -> None:
    aliases = {info.alias for info in renamed.owner.model_fields.values()}
    assert renamed.new in aliases
    assert renamed.name not in aliases
    assert renamed.new in parent_schema(place)["properties"]


@CASES
def test_error_for_an_old_name_names_the_new_field(renamed: RenamedField, place: str) -> None:
    kind = SpecDecodeCaptureSpec if is_of_captures(place) else SpecDecodeDeploymentSpec
    spec: Body = {"deployment": "llama"} if is_of_captures(place) else pair_70b()
    parent: Body = {"spec": spec}
    for part in place.split("."):
        if part.endswith("[]"):
            parent = parent.setdefault(part.removesuffix("[]"), [{"name": "nightly", "schedule": "0 3 * * *"}])[0]
        else:
            parent = parent.setdefault(part, {})
    if renamed.owner.__name__ == "Override":
        parent["reason"] = "measured"
    parent[renamed.name] = VALUES[renamed.schema["type"]]
    with pytest.raises(InvalidSpecError) as rejected:
        parsed_spec(kind, spec)
    where = place.replace("[]", "[0]")
    assert [(each.field, each.message) for each in rejected.value.problems] == [
        (f"{where}.{renamed.name}", renamed.message)
    ]


@CASES
def test_the_reference_lists_an_old_name_only_as_renamed(renamed: RenamedField, place: str) -> None:
    kind = "capture" if is_of_captures(place) else "deployment"
    text = (ROOT / f"docs/reference/{kind}-fields.md").read_text()
    assert f"| `{place}.{renamed.name}` | `{place}.{renamed.new}` | {renamed.hint} |" in text
    assert text.count(f"{place}.{renamed.name}`") == 1
    assert f"\n| `{renamed.name}` |" not in text.partition("## status")[0]


def test_old_name_in_another_object_is_an_unknown_field() -> None:
    with pytest.raises(InvalidSpecError, match="unknown field"):
        admitted_spec(pair_70b() | {"planning": "Ignore"})
    assert "planning" not in {info.alias for info in SpecDecodeDeploymentSpec.model_fields.values()}
