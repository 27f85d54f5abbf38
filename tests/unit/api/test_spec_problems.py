"""Places in a spec are written as people write them."""

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.spec_problems import SYNONYMS, admitted_spec, inner_model, spec_problems
from specdecode_operator.problems import InvalidSpecError

TARGET = {"model": "org/target"}


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        (
            {"target": {**TARGET, "quantization": "Auto", "checkpoints": [{"model": "org/x", "quantization": "INT3"}]}},
            "spec.target.checkpoints[0].quantization",
            "use one of",
        ),
        (
            {"target": {**TARGET, "quantization": "Auto", "checkpoints": [{"model": "org/x", "quantisation": "INT4"}]}},
            "spec.target.checkpoints[0].quantisation",
            "unknown field: did you mean quantization?",
        ),
        ({"engine": {"env": [{"name": "A"}, {"name": "B C"}]}}, "spec.engine.env[1].name", "must match"),
        # vLLM's own spelling of the share.
        ({"serving": {"gpuMemoryUtilizationPercent": 0.9}}, "spec.serving.gpuMemoryUtilizationPercent", "write 90"),
        ({"speculation": {"method": "eagle-3"}}, "spec.speculation.method", "did you mean eagle3?"),
        ({"autoscaling": {"maxReplicas": 4, "target": 0.8}}, "spec.autoscaling.target", "write 80 for 80 %"),
    ],
)
def test_problem_names_the_field_and_the_fix(changes: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(ValidationError) as refused:
        SpecDecodeDeploymentSpec.model_validate({"target": TARGET, **changes})
    problems = {problem.field: problem.message for problem in spec_problems(refused.value)}
    assert words in problems[field]


@pytest.mark.parametrize(
    ("replicas", "message"),
    [
        ("3", "must be a whole number, without quotes"),
        ("99999999999", "must be at most 1,000"),
        ("-1", "must be at least 0"),
        ("True", "must be a whole number"),
        ("three", "must be a whole number"),
        ("", "must be a whole number"),
        ("9" * 5000, "must be a whole number"),
    ],
)
def test_removing_quotes_is_suggested_only_if_it_fixes_the_value(replicas: str, message: str) -> None:
    with pytest.raises(ValidationError) as refused:
        SpecDecodeDeploymentSpec.model_validate({"target": TARGET, "replicas": replicas})
    (problem,) = spec_problems(refused.value)
    assert (problem.field, problem.message) == ("spec.replicas", message)


@pytest.mark.parametrize(
    ("given", "words"),
    [(14.5, "must be text: put it in quotes"), (True, "a size in GiB"), (1e9, "9 characters at most")],
)
def test_adding_quotes_is_suggested_only_if_it_fixes_the_value(given: float, words: str) -> None:
    target = {**TARGET, "assume": {"weightsGiB": given}}
    with pytest.raises(ValidationError) as refused:
        SpecDecodeDeploymentSpec.model_validate({"target": target})
    (problem,) = spec_problems(refused.value)
    assert problem.field == "spec.target.assume.weightsGiB"
    assert words in problem.message


@pytest.mark.parametrize(("wrong", "told"), [(50, 50), (51, 51), (80, 51)])
def test_at_most_50_problems_are_listed_with_the_total(wrong: int, told: int) -> None:
    with pytest.raises(ValidationError) as refused:
        SpecDecodeDeploymentSpec.model_validate({"target": TARGET, **{f"f{number}": 1 for number in range(wrong)}})
    problems = spec_problems(refused.value)
    assert len(problems) == told
    assert (problems[-1].value == f"{wrong} problems") is (wrong > 50)


@pytest.mark.parametrize(
    ("changes", "field", "meant"),
    [
        ({"model": "a"}, "spec.model", "spec.target.model"),
        ({"numSpeculativeTokens": 3}, "spec.numSpeculativeTokens", "spec.speculation.numSpeculativeTokens"),
        ({"speculation": {"model": "a"}}, "spec.speculation.model", "spec.speculation.draft.model"),
        ({"parallelism": {"tensorParallelSize": 2}}, "spec.parallelism.tensorParallelSize", "spec.parallelism.tensor"),
        ({"max_model_len": 2}, "spec.max_model_len", "spec.serving.maxModelLen"),
        ({"resources": {}}, "spec.resources", "spec.podTemplate.spec.containers[name=engine].resources"),
        ({"accelerator": {"nodeSelector": {}}}, "spec.accelerator.nodeSelector", "spec.podTemplate.spec.nodeSelector"),
        ({"serving": {"gpuMemoryUtilisation": 1}}, "spec.serving.gpuMemoryUtilisation", "gpuMemoryUtilizationPercent"),
        ({"image": "a:1"}, "spec.image", "spec.engine.image"),
    ],
)
def test_unknown_field_suggests_the_intended_field(changes: dict[str, Any], field: str, meant: str) -> None:
    with pytest.raises(ValidationError) as refused:
        SpecDecodeDeploymentSpec.model_validate({"target": TARGET, **changes})
    problems = {problem.field: problem.message for problem in spec_problems(refused.value)}
    assert problems[field] == f"unknown field: did you mean {meant}?"


def test_field_of_another_object_is_not_suggested_for_an_item_of_a_list() -> None:
    route = {"parentRefs": [{"name": "public", "kind": "Service"}]}  # spec.workload has a kind
    with pytest.raises(ValidationError) as refused:
        SpecDecodeDeploymentSpec.model_validate({"target": TARGET, "expose": {"httpRoute": route}})
    (problem,) = spec_problems(refused.value)
    assert problem.field == "spec.expose.httpRoute.parentRefs[0].kind"
    assert "use one of name, namespace, sectionName, port" in problem.message


@pytest.mark.parametrize(
    ("schedule", "field"),
    [
        ({"template": {"deployment": "llama"}}, "template.deployment"),
        (
            {"training": {"gpuHoursPerMonth": 1, "template": {"trainer": {"image": "a"}, "captures": ["a"]}}},
            "training.template.captures",
        ),
    ],
)
def test_field_that_a_schedule_sets_is_to_be_removed_from_its_template(schedule: dict[str, Any], field: str) -> None:
    captures = [{"name": "weekly", "schedule": "0 3 * * 1", **schedule}]
    with pytest.raises(ValidationError) as refused:
        SpecDecodeDeploymentSpec.model_validate({"target": TARGET, "captures": captures})
    (problem,) = spec_problems(refused.value)
    assert problem.field == f"spec.captures[0].{field}"
    assert problem.message.endswith("remove it")


@pytest.mark.parametrize("name", ["name", "zzz"])
def test_unknown_field_without_a_clear_match_lists_the_fields(name: str) -> None:
    with pytest.raises(ValidationError) as refused:
        SpecDecodeDeploymentSpec.model_validate({"target": TARGET, name: 1})
    (problem,) = spec_problems(refused.value)
    assert problem.message.startswith("unknown field: use one of target, speculation, ")


def test_synonyms_name_fields_that_exist() -> None:
    for path in SYNONYMS.values():
        model: type[BaseModel] | None = SpecDecodeDeploymentSpec
        for name in path.partition(".spec.")[0].partition(".metadata.")[0].split("."):
            assert model is not None
            assert name in {info.alias for info in model.model_fields.values()}
            model = inner_model(model, name)


@pytest.mark.parametrize(
    ("changes", "field", "form"),
    [
        ({"models": {"hubTokenSecret": "hf"}}, "spec.models.hubTokenSecret", "{name: hf, key: KEY}"),
        ({"accelerator": {"products": "NVIDIA-H200"}}, "spec.accelerator.products", "[NVIDIA-H200]"),
        ({"engine": {"extraArgs": "--a b"}}, "spec.engine.extraArgs", '["--a", "b"]'),
        ({"engine": {"env": {"A": "b"}}}, "spec.engine.env", "[{name: NAME}]"),
        ({"target": ["a"]}, "spec.target", "{model: MODEL}"),
        ({"engine": {"version": 0.3}}, "spec.engine.version", 'is the number 0.3: write "0.30"'),
        ({"engine": {"version": 0.28}}, "spec.engine.version", 'write "0.28"'),
    ],
)
def test_wrong_type_shows_the_expected_form(changes: dict[str, Any], field: str, form: str) -> None:
    with pytest.raises(ValidationError) as refused:
        SpecDecodeDeploymentSpec.model_validate({"target": TARGET, **changes})
    (problem,) = spec_problems(refused.value)
    assert (problem.field, problem.message.endswith(form)) == (field, True)


def test_rule_problem_shows_only_what_the_user_wrote() -> None:
    speculation = {"method": "ngram", "numSpeculativeTokens": 3, "draft": {"model": "org/draft"}}
    with pytest.raises(InvalidSpecError) as refused:
        admitted_spec({"target": TARGET, "speculation": speculation})
    (problem,) = refused.value.problems
    assert (problem.field, problem.value) == ("spec.speculation.draft", '{"model": "org/draft"}')
