"""What a plan chooses among the checkpoints of a spec, what is then launched, and what changes the choice."""

import csv
import io
import json
from typing import Any

import pytest

from specdecode_operator.api.deployment_status import SpecDecodeDeploymentStatus
from specdecode_operator.cluster.nodes import NodeFacts
from specdecode_operator.deployment.children import matrix_table
from specdecode_operator.deployment.desired_state import DesiredState, Launch
from specdecode_operator.deployment.observed.observation import Observation
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.deployment.planning import full_matrix, plan_change
from specdecode_operator.deployment.status import compose_status
from specdecode_operator.sizing.catalogue import find_entry
from tests.support.decisions import NOW, desired_state
from tests.support.objects import H100, H200, pair_70b, parent

H100_NODE, H200_NODE = NodeFacts("h100-0", H100, 8), NodeFacts("h200-0", H200, 8)
LLAMA_70B = "meta-llama/Llama-3.1-70B-Instruct"
LLAMA_8B = "meta-llama/Llama-3.1-8B-Instruct"


def int4(model: str, name: str) -> dict[str, Any]:
    """An INT4 checkpoint of a model of the catalogue."""
    entry = find_entry(model)
    assert entry is not None
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    config = {**entry.config, "quantization_config": quantization}
    return {"quantization": "INT4", "model": name, "config": config}


def spec(**changes: Any) -> dict[str, Any]:
    """The 70B pair, whose target may be served in BF16, FP8 or INT4."""
    target = {"model": LLAMA_70B, "quantization": "Auto", "checkpoints": [int4(LLAMA_70B, "org/llama-70b-awq")]}
    return pair_70b(**{"target": target, "parallelism": {}, **changes})


def decide(body: dict[str, Any], *nodes: NodeFacts) -> tuple[DesiredState, SpecDecodeDeploymentStatus]:
    owner = parse_deployment(body)
    desired = desired_state(owner, nodes)
    return desired, compose_status(owner, desired, Observation(), NOW)


def planned(body: dict[str, Any], *nodes: NodeFacts) -> tuple[Any, ...]:
    plan = decide(body, *nodes)[1].plan
    assert plan is not None
    return plan.target_quantization, plan.draft_quantization, plan.product, plan.tensor


def as_json(status: SpecDecodeDeploymentStatus) -> dict[str, Any]:
    return status.model_dump(by_alias=True, mode="json", exclude_none=True)


def problem(body: dict[str, Any]) -> str:
    _, status = decide(body, H100_NODE)
    return {condition.type: condition for condition in status.conditions}["Accepted"].message


def engine(desired: DesiredState) -> Any:
    return next(child for child in desired.children if child["kind"] == "Deployment")["spec"]["template"]["spec"]


@pytest.mark.parametrize(
    ("objective", "nodes", "wanted"),
    [
        ("Quality", (H200_NODE,), ("BF16", "BF16", H200, 2)),
        ("Quality", (H100_NODE,), ("BF16", "BF16", H100, 4)),
        ("Quality", (NodeFacts("small", H100, 2),), ("FP8", "BF16", H100, 2)),
        ("Cost", (H100_NODE, H200_NODE), ("INT4", "BF16", H100, 1)),
    ],
)
def test_auto_follows_the_objective(objective: str, nodes: tuple[NodeFacts, ...], wanted: tuple[Any, ...]) -> None:
    assert planned(parent(spec(objective=objective)), *nodes) == wanted


def test_capacity_takes_the_most_tokens_for_each_gpu() -> None:
    desired, status = decide(parent(spec(objective="Capacity")), H100_NODE, H200_NODE)
    assert status.plan is not None
    assert status.plan.product == H200
    assert isinstance(desired.outcome, Launch)
    per_gpu = [row.budget.kv_cache_tokens / row.tensor for row in desired.outcome.plan.rows]
    assert per_gpu[0] == max(per_gpu)


def test_the_chosen_checkpoint_is_downloaded_and_served_under_the_name_of_the_model() -> None:
    desired, _ = decide(parent(spec(objective="Cost")), H100_NODE)
    pod = engine(desired)
    downloads = [" ".join(container["command"]) for container in pod["initContainers"]]
    assert any("org/llama-70b-awq" in command for command in downloads)
    assert not any(LLAMA_70B in command for command in downloads)
    command = pod["containers"][0]["command"]
    assert "/models/org/llama-70b-awq" in command
    assert command[command.index("--served-model-name") + 1] == "Llama-3.1-70B-Instruct"


def test_fp8_that_is_chosen_is_made_while_loading() -> None:
    desired, status = decide(parent(spec()), NodeFacts("small", H100, 2))
    command = engine(desired)["containers"][0]["command"]
    assert f"/models/{LLAMA_70B}" in command
    assert command[command.index("--quantization") + 1] == "fp8_per_tensor"
    assert status.plan is not None
    assert "Quality takes FP8 target, BF16 draft" in status.plan.explanation


def test_a_precision_that_is_asked_for_comes_from_its_checkpoint() -> None:
    target = {**spec()["target"], "quantization": "INT4"}
    desired, status = decide(parent(spec(target=target)), H100_NODE)
    assert status.plan is not None
    assert status.plan.target_quantization == "INT4"
    assert "/models/org/llama-70b-awq" in engine(desired)["containers"][0]["command"]


def test_the_draft_has_a_choice_of_its_own() -> None:
    draft = {"model": LLAMA_8B, "quantization": "Auto", "checkpoints": [int4(LLAMA_8B, "org/llama-8b-awq")]}
    speculation = {"method": "draft_model", "numSpeculativeTokens": 5, "draft": draft}
    target = {"model": LLAMA_70B, "quantization": "FP8"}
    body = parent(spec(speculation=speculation, target=target, objective="Capacity", parallelism={"tensor": 2}))
    desired, status = decide(body, H100_NODE)
    assert status.plan is not None
    assert (status.plan.target_quantization, status.plan.draft_quantization) == ("FP8", "INT4")
    command = engine(desired)["containers"][0]["command"]
    config = json.loads(command[command.index("--speculative-config") + 1])
    assert config["model"] == "/models/org/llama-8b-awq"


class TestReplanning:
    """What makes a plan in force give way."""

    def test_a_choice_stays_while_the_question_does(self) -> None:
        small = NodeFacts("small", H100, 2)
        _, before = decide(parent(spec()), small)
        later = parent({**spec(), "replicas": 2}, generation=2, status=as_json(before))
        assert planned(later, small, H200_NODE) == ("FP8", "BF16", H100, 2)

    @pytest.mark.parametrize(
        ("changes", "wanted"),
        [
            ({"objective": "Cost"}, ("INT4", "BF16", H100, 1)),
            ({"target": {"model": LLAMA_70B}}, ("BF16", "BF16", H200, 2)),
            ({"target": {"model": LLAMA_70B, "quantization": "FP8"}, "objective": "Cost"}, ("FP8", "BF16", H200, 1)),
        ],
        ids=["other objective", "no choice any more", "another precision"],
    )
    def test_another_question_gets_another_plan(self, changes: dict[str, Any], wanted: tuple[Any, ...]) -> None:
        small = NodeFacts("small", H100, 2)
        _, before = decide(parent(spec()), small)
        later = parent({**spec(), **changes}, generation=2, status=as_json(before))
        assert planned(later, small, H200_NODE) == wanted

    def test_other_devices_get_another_plan(self) -> None:
        _, before = decide(parent(spec()), NodeFacts("small", H100, 2))
        assert planned(parent(spec(), status=as_json(before)), H200_NODE) == ("BF16", "BF16", H200, 2)

    def test_other_facts_of_a_model_get_another_plan(self) -> None:
        """As after an operator with a new catalogue, or a config.json that was read again."""
        target = {"model": "org/mine", "config": {**find_entry(LLAMA_8B).config}}  # type: ignore[union-attr]
        body = spec(target=target, speculation={"method": "none"}, serving={"maxModelLen": 8192})
        _, before = decide(parent(body), H100_NODE)
        grown = {**body, "target": {**target, "config": {**find_entry(LLAMA_70B).config}}}  # type: ignore[union-attr]
        assert planned(parent(body, status=as_json(before)), H100_NODE) == ("BF16", None, H100, 1)
        assert planned(parent(grown, status=as_json(before)), H100_NODE) == ("BF16", None, H100, 4)


BAD = {
    "another precision than it says": (
        {**int4(LLAMA_70B, "org/x"), "quantization": "INT8"},
        "spec.target.checkpoints[0].quantization: INT8: org/x is INT4: write INT4",
    ),
    "another model": (int4(LLAMA_8B, "org/x"), "spec.target.checkpoints[0].model: org/x: is no checkpoint of"),
    "the model's own precision": (
        {"quantization": "BF16", "model": "org/x", "config": {**find_entry(LLAMA_70B).config}},  # type: ignore[union-attr]
        "spec.target.checkpoints[0].quantization: BF16: meta-llama/Llama-3.1-70B-Instruct itself is BF16",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_checkpoint_that_is_none_of_the_model_is_refused(case: str) -> None:
    checkpoint, message = BAD[case]
    assert message in problem(parent(spec(target={"model": LLAMA_70B, "checkpoints": [checkpoint]})))


def test_an_unknown_checkpoint_is_read_first() -> None:
    target = {
        "model": LLAMA_70B,
        "quantization": "Auto",
        "checkpoints": [{"quantization": "INT4", "model": "org/unknown"}],
    }
    desired, _ = decide(parent(spec(target=target)), H100_NODE)
    assert [child["kind"] for child in desired.children] == ["Job"]
    assert "org/unknown" in json.dumps(desired.children)


def test_the_config_map_holds_the_whole_matrix() -> None:
    desired, _ = decide(parent(spec()), H100_NODE, H200_NODE)
    data = next(child for child in desired.children if child["kind"] == "ConfigMap")["data"]
    rows = list(csv.DictReader(io.StringIO(data["matrix.csv"])))
    assert len(rows) == 6 * 6 * 2 * 2 * 4, "targets x drafts x KV cache x products x splits"
    chosen = [row for row in rows if (row["target"], row["draft"], row["product"]) == ("BF16", "BF16", H200)]
    assert [row["verdict"] for row in chosen if row["tensor"] == "2"] == ["Fits", "Fits"]
    assert [(row["target"], row["gpus"]) for row in rows if row["chosen"] == "yes"] == [("BF16", "2")]
    int8 = next(row for row in rows if row["target"] == "INT8")
    assert (int8["launchable"], int8["reason"].split(";")[0]) == ("no", "target INT8 needs a checkpoint")
    assert json.loads(data["plan.json"])["matrixRowsLeftOut"] == 0
    assert len(json.dumps(data)) < 300_000


def test_a_matrix_without_room_keeps_what_can_be_used() -> None:
    desired, _ = decide(parent(spec()), H100_NODE, H200_NODE)
    assert isinstance(desired.outcome, Launch)
    rows = full_matrix(desired.outcome.facts, (H100_NODE, H200_NODE), desired.outcome.plan)
    whole = len(matrix_table(rows).csv)
    less = matrix_table(rows, largest_bytes=whole - 1)
    assert less.rows_left_out > 0
    assert "needs a checkpoint" not in less.csv
    least = matrix_table(rows, largest_bytes=2000)
    assert len(least.csv) <= 2000
    assert least.csv.count("\n") - 1 + least.rows_left_out == len(rows)
    assert matrix_table(()).csv == ""


def test_a_checkpoint_that_asks_for_an_fp8_cache_is_said_to() -> None:
    target = {"model": "nvidia/Llama-3.1-70B-Instruct-FP8"}
    _, status = decide(parent(spec(target=target)), H100_NODE)
    assert status.plan is not None
    assert status.plan.kv_cache_dtype == "fp8"
    _, other = decide(parent(spec(target=target, serving={"kvCacheDtype": "bfloat16", "maxModelLen": 8192})), H100_NODE)
    assert other.plan is not None
    assert other.plan.kv_cache_dtype == "bfloat16"
    assert other.plan.kv_bytes_per_token == 2 * status.plan.kv_bytes_per_token


def test_a_plan_that_is_kept_says_what_would_be_chosen_anew() -> None:
    small = NodeFacts("small", H100, 2)
    _, before = decide(parent(spec()), small)
    _, kept = decide(parent(spec(), status=as_json(before)), small, H200_NODE)
    assert kept.plan is not None
    assert kept.plan.target_quantization == "FP8"
    assert "it is in force and kept, a new plan would be: 2 x NVIDIA-H200" in kept.plan.explanation
    assert plan_change(before.plan, kept.plan) is None


def test_a_change_of_plan_is_told() -> None:
    small = NodeFacts("small", H100, 2)
    _, before = decide(parent(spec()), small)
    _, after = decide(parent(spec(objective="Cost"), generation=2, status=as_json(before)), small)
    told = plan_change(before.plan, after.plan)
    assert told is not None
    assert told.startswith(f"FP8 + BF16 on 2 x {H100} -> INT4 + BF16 on 1 x {H100}: ")
    assert plan_change(None, after.plan) is None


def test_a_checkpoint_that_nothing_asks_for_holds_nothing_up() -> None:
    target = {"model": LLAMA_70B, "checkpoints": [{"quantization": "INT4", "model": "org/unknown"}]}
    assert planned(parent(spec(target=target)), H100_NODE) == ("BF16", "BF16", H100, 4)
