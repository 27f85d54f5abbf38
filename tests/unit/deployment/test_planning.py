"""Choose checkpoint, product and parallelism, and keep a plan while its question stays the same."""

import csv
import io
import json
from typing import Any

import pytest

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.deployment_status import PlanStatus, SpecDecodeDeploymentStatus
from specdecode_operator.cluster.nodes import NodeFacts
from specdecode_operator.deployment.desired_state import DesiredState, Launch
from specdecode_operator.deployment.engine_settings import engine_settings
from specdecode_operator.deployment.observed.observation import Observation
from specdecode_operator.deployment.parsed_deployment import parse_deployment
from specdecode_operator.deployment.planning import admitted, assumed_nodes, make_plan, plan_change
from specdecode_operator.deployment.spec_facts import Facts
from specdecode_operator.deployment.status import compose_status
from specdecode_operator.deployment.validation import valid_facts
from specdecode_operator.deployment.warnings import plan_notes
from specdecode_operator.sizing.catalogue import find_entry
from specdecode_operator.sizing.memory.budget import Term, Verdict
from specdecode_operator.sizing.plan import Change, Plan
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
    return {condition.type: condition for condition in status.conditions}["Ready"].message


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
def test_auto_quantization_follows_the_objective(
    objective: str, nodes: tuple[NodeFacts, ...], wanted: tuple[Any, ...]
) -> None:
    assert planned(parent(spec(objective=objective)), *nodes) == wanted


def test_capacity_maximizes_kv_cache_tokens_per_gpu() -> None:
    desired, status = decide(parent(spec(objective="Capacity")), H100_NODE, H200_NODE)
    assert status.plan is not None
    assert status.plan.product == H200
    assert isinstance(desired.outcome, Launch)
    per_gpu = [row.budget.kv_cache_tokens / row.tensor for row in desired.outcome.plan.rows]
    assert per_gpu[0] == max(per_gpu)


def test_chosen_checkpoint_is_served_under_the_model_name() -> None:
    desired, _ = decide(parent(spec(objective="Cost")), H100_NODE)
    pod = engine(desired)
    downloads = [" ".join(container["command"]) for container in pod["initContainers"]]
    assert any("org/llama-70b-awq" in command for command in downloads)
    assert not any(LLAMA_70B in command for command in downloads)
    command = pod["containers"][0]["command"]
    assert "/models/org/llama-70b-awq" in command
    assert command[command.index("--served-model-name") + 1] == "Llama-3.1-70B-Instruct"


class TestReplanning:
    """What makes a plan in force give way."""

    def test_plan_is_kept_if_only_replicas_change(self) -> None:
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
    def test_changed_objective_or_target_gets_a_new_plan(
        self, changes: dict[str, Any], wanted: tuple[Any, ...]
    ) -> None:
        small = NodeFacts("small", H100, 2)
        _, before = decide(parent(spec()), small)
        later = parent({**spec(), **changes}, generation=2, status=as_json(before))
        assert planned(later, small, H200_NODE) == wanted

    def test_changed_model_config_gets_a_new_plan(self) -> None:
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
        "spec.target.checkpoints[0].quantization: INT8: checkpoint org/x has precision INT4; write INT4",
    ),
    "another model": (int4(LLAMA_8B, "org/x"), "spec.target.checkpoints[0].model: org/x: is not a checkpoint of"),
    "the model's own precision": (
        {"quantization": "BF16", "model": "org/x", "config": {**find_entry(LLAMA_70B).config}},  # type: ignore[union-attr]
        "spec.target.checkpoints[0].quantization: BF16: meta-llama/Llama-3.1-70B-Instruct already has precision BF16",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_checkpoint_that_does_not_match_the_model_is_refused(case: str) -> None:
    checkpoint, message = BAD[case]
    assert message in problem(parent(spec(target={"model": LLAMA_70B, "checkpoints": [checkpoint]})))


def test_plan_config_map_has_the_whole_matrix() -> None:
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


def test_kept_plan_names_the_plan_that_would_replace_it() -> None:
    small = NodeFacts("small", H100, 2)
    _, before = decide(parent(spec()), small)
    _, kept = decide(parent(spec(), status=as_json(before)), small, H200_NODE)
    assert kept.plan is not None
    assert kept.plan.target_quantization == "FP8"
    assert "it is in force and kept, a new plan would be: 2 x NVIDIA-H200" in kept.plan.explanation
    assert plan_change(before.plan, kept.plan) is None


def test_plan_change_is_described() -> None:
    small = NodeFacts("small", H100, 2)
    _, before = decide(parent(spec()), small)
    _, after = decide(parent(spec(objective="Cost"), generation=2, status=as_json(before)), small)
    told = plan_change(before.plan, after.plan)
    assert told is not None
    assert told.startswith(f"FP8 + BF16 on 2 x {H100} -> INT4 + BF16 on 1 x {H100}: ")
    assert plan_change(None, after.plan) is None


EIGHT_H100, EIGHT_H200 = NodeFacts("h100-0", H100, 8), NodeFacts("h200-0", H200, 8)


def split_spec(model: str = "meta-llama/Llama-3.1-70B-Instruct", **parallelism: Any) -> Body:
    """A spec that speculates with n-grams, which needs no memory of its own."""
    speculation = {"method": "ngram", "numSpeculativeTokens": 4}
    return pair_70b(target={"model": model}, speculation=speculation, parallelism=parallelism)


def wide() -> Body:
    """A spec in two stages whose KV cache needs a tensor parallelism of two."""
    return {**split_spec(pipeline=2), "serving": {"maxModelLen": 8192, "minConcurrency": 8}}


def launched(body: Body, *nodes: NodeFacts) -> tuple[PlanStatus, Body]:
    """The plan in the status, and the Deployment."""
    owner = parse_deployment(parent(body))
    desired = desired_state(owner, nodes)
    assert isinstance(desired.outcome, Launch), desired.conditions
    plan = compose_status(owner, desired, Observation(), NOW).plan
    assert plan is not None
    return plan, next(child for child in desired.children if child["kind"] == "Deployment")


def engine_of(deployment: Body) -> Body:
    container: Body = deployment["spec"]["template"]["spec"]["containers"][0]
    return container


@pytest.mark.parametrize(
    ("parallelism", "gpus", "arguments"),
    [
        ({"tensor": 2, "pipeline": 2}, 4, ["--pipeline-parallel-size", "2"]),
        ({"tensor": 2, "data": 2}, 4, ["--data-parallel-size", "2"]),
        ({"tensor": 2, "pipeline": 2, "data": 2}, 8, ["--pipeline-parallel-size", "2", "--data-parallel-size", "2"]),
    ],
)
def test_gpus_are_tensor_by_pipeline_by_data(parallelism: dict[str, int], gpus: int, arguments: list[str]) -> None:
    plan, deployment = launched(split_spec(**parallelism), EIGHT_H200)
    assert plan.gpus_per_replica == gpus
    assert (plan.tensor, plan.pipeline, plan.data) == (2, parallelism.get("pipeline", 1), parallelism.get("data", 1))
    engine = engine_of(deployment)
    assert engine["resources"] == {"limits": {"nvidia.com/gpu": str(gpus)}}
    assert " ".join(arguments) in " ".join(engine["command"])
    shm = next(each for each in deployment["spec"]["template"]["spec"]["volumes"] if each["name"] == "shm")
    assert shm["emptyDir"]["sizeLimit"] == f"{gpus}Gi"


def test_plan_chooses_the_tensor_size_for_given_pipeline_stages() -> None:
    """Eight requests beside 70B in BF16 need four GPUs of 80 GB: two stages of two, not of one."""
    plan, _ = launched(wide(), EIGHT_H100)
    assert (plan.tensor, plan.pipeline, plan.gpus_per_replica) == (2, 2, 4)
    assert "4 x NVIDIA-H100-80GB-HBM3 per replica (TP 2, PP 2)" in plan.explanation


def test_draft_is_sharded_like_the_target_in_plan_and_status() -> None:
    plan, deployment = launched(pair_70b(parallelism={"tensor": 2, "draftTensor": 1}), EIGHT_H200)
    assert plan.draft_tensor == 2
    line = engine_of(deployment)["command"]
    config = json.loads(line[line.index("--speculative-config") + 1])
    assert config["draft_tensor_parallel_size"] == 1
    assert launched(pair_70b(parallelism={"tensor": 2}), EIGHT_H200)[0].per_gpu == plan.per_gpu
    assert launched(split_spec(tensor=2), EIGHT_H200)[0].draft_tensor is None


ONE_H100 = "NVIDIA-H100-80GB-HBM3"
MTP = {"method": "mtp", "numSpeculativeTokens": 2}
WITH_STATES = "Qwen/Qwen3.6-35B-A3B"
"""Of its weights in 16 bits one H100 holds little more."""


def planned_with_states(
    model: str = WITH_STATES, speculation: dict[str, Any] | None = None, **serving: Any
) -> tuple[Facts, Plan]:
    body = {
        "target": {"model": model},
        "parallelism": {"tensor": 1},
        "accelerator": {"products": [ONE_H100]},
        "serving": {"maxModelLen": 32768, **serving},
    }
    facts = valid_facts(SpecDecodeDeploymentSpec.model_validate(body | {"speculation": speculation or MTP}))
    plan = make_plan(facts, assumed_nodes(facts), None)
    assert isinstance(plan, Plan)
    return facts.at(*plan.chosen.served), plan


def test_default_max_num_seqs_is_lowered_to_the_mamba_blocks() -> None:
    facts, plan = planned_with_states()
    served = engine_settings(facts.spec, facts.pair, 1).max_num_seqs
    assert served < facts.spec.serving.max_num_seqs
    assert served <= plan.chosen.budget.num_blocks
    assert plan.verdict is not Verdict.DOES_NOT_FIT
    assert any(f"maxNumSeqs is {served} instead of the default 256" in note for note in plan_notes(facts))


def test_explicit_max_num_seqs_beyond_the_blocks_does_not_fit() -> None:
    _, plan = planned_with_states(maxNumSeqs=255)
    budget = plan.chosen.budget
    assert (plan.verdict, budget.binding_term) == (Verdict.DOES_NOT_FIT, Term.SEQUENCES)
    assert budget.fewer_seqs is None
    assert budget.num_blocks < 255
    assert f"maxNumSeqs 255 exceeds the {budget.num_blocks} blocks" in plan.explanation
    assert any(change.field == "serving.maxNumSeqs" for fix in plan.fixes for change in fix.changes)


@pytest.mark.parametrize(
    "serving", [{"enforceEager": True}, {"cudagraphMode": "NONE"}, {"cudagraphMode": "PIECEWISE"}], ids=str
)
def test_max_num_seqs_may_exceed_blocks_without_full_cuda_graphs(serving: dict[str, Any]) -> None:
    facts, plan = planned_with_states(**serving)
    assert plan.chosen.budget.num_blocks < facts.pair.limits.max_num_seqs == 256
    assert plan.verdict is not Verdict.DOES_NOT_FIT
    assert not any("maxNumSeqs is" in note for note in plan_notes(facts))


def test_max_num_seqs_covered_by_a_schedule_is_not_lowered() -> None:
    ranges = [{"from": 1, "to": 256, "numSpeculativeTokens": 1}]
    facts, plan = planned_with_states(speculation=MTP | {"numSpeculativeTokensByBatchSize": ranges}, maxModelLen=4096)
    assert facts.pair.limits.max_num_seqs == 256
    assert plan.chosen.budget.binding_term is Term.SEQUENCES


SPEC: dict[str, Any] = {
    "target": {"model": "meta-llama/Llama-3.1-8B-Instruct"},
    "speculation": {"method": "ngram", "numSpeculativeTokens": 4},
}


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        (Change("serving.maxNumSeqs", 64), True),
        # Out of bounds, against a CEL rule, and against a rule of vLLM's.
        (Change("serving.maxNumSeqs", 0), False),
        (Change("serving.maxNumBatchedTokens", 128), False),
        (Change("serving.maxModelLen", 10_000_000), False),
    ],
)
def test_only_changes_that_validation_accepts_are_proposed(change: Change, *, taken: bool) -> None:
    facts = valid_facts(SpecDecodeDeploymentSpec.parse(SPEC))
    assert (admitted(facts, facts.pair, (change,)) == (change,)) is taken
