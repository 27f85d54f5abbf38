"""From a spec and what was seen to objects, conditions and figures."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from specdecode_operator.api.status import Condition, SpecDecodeDeploymentStatus
from specdecode_operator.cluster.engine_probe import Unreachable
from specdecode_operator.cluster.fleet import NodeFacts
from specdecode_operator.engine.metrics import EngineReading, SpeculationReading
from specdecode_operator.services.decision import (
    Intent,
    Launch,
    Observation,
    compose_status,
    intend,
    read_parent,
)
from specdecode_operator.services.findings import news
from specdecode_operator.services.rollout import current_pods
from tests.support.objects import H100, H200, deployment, ended, pair_70b, parent, pod, tiny_cpu, waiting

NOW = datetime(2026, 1, 1, tzinfo=UTC)
H100_NODE, H200_NODE = NodeFacts("h100-0", H100, 8), NodeFacts("h200-0", H200, 8)


def decide(
    body: dict[str, Any], observation: Observation | None = None, nodes: tuple[NodeFacts, ...] = (H100_NODE, H200_NODE)
) -> tuple[Intent, SpecDecodeDeploymentStatus, dict[str, Condition]]:
    owner = read_parent(body)
    intent = intend(owner, nodes)
    status = compose_status(owner, intent, observation or Observation(), NOW)
    return intent, status, {condition.type: condition for condition in status.conditions}


def summary(conditions: dict[str, Condition]) -> tuple[str, str, str, str]:
    ready = conditions["Ready"]
    return ready.status, ready.reason, conditions["Reconciling"].status, conditions["Stalled"].status


def reading(**changes: Any) -> EngineReading:
    fields: dict[str, Any] = {
        "num_gpu_blocks": 3276,
        "block_size": 128,
        "kv_cache_tokens": 419_328,
        "kv_cache_max_concurrency": 409.5,
        "speculation": SpeculationReading(drafts=0, draft_tokens=0, accepted_tokens=0, accepted_per_position=(0, 0, 0)),
        "generation_tokens": 0,
        "requests_running": 0,
        "requests_waiting": 0,
    }
    return EngineReading(**{**fields, **changes})


def drafted(drafts: int, accepted: int) -> SpeculationReading:
    return SpeculationReading(drafts, 3 * drafts, accepted, (accepted, 0, 0))


SERVING = deployment(replicas=1, updated=1, available=1)


def test_a_pair_that_fits_is_planned_on_the_product_that_holds_it() -> None:
    intent, status, conditions = decide(parent(pair_70b()))
    assert status.plan is not None
    assert (status.plan.verdict, status.plan.product, status.plan.tensor) == ("Fits", H200, 2)
    assert conditions["Planned"].status == "True"
    engine = intent.children[-1]
    assert engine["spec"]["template"]["spec"]["nodeSelector"] == {"nvidia.com/gpu.product": H200}
    container = engine["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "2"}}


def test_a_plan_that_does_not_fit_creates_no_pod_and_names_the_smallest_fix() -> None:
    intent, status, conditions = decide(parent(pair_70b()), nodes=(H100_NODE,))
    assert [child["kind"] for child in intent.children] == ["ConfigMap"]
    assert summary(conditions) == ("False", "DoesNotFit", "False", "True")
    assert conditions["Planned"].status == "False"
    assert "weights" in conditions["Planned"].message
    assert "target.quantization: FP8" in conditions["Planned"].message
    assert status.plan is not None
    assert status.plan.verdict == "DoesNotFit"


def test_the_fix_that_is_named_works() -> None:
    body = parent(pair_70b(target={"model": "meta-llama/Llama-3.1-70B-Instruct", "quantization": "FP8"}))
    intent, status, _ = decide(body, nodes=(H100_NODE,))
    assert status.plan is not None
    assert (status.plan.verdict, status.plan.product) == ("Fits", H100)
    command = intent.children[-1]["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[command.index("--quantization") + 1] == "fp8_per_tensor"


def test_an_override_launches_what_does_not_fit_and_says_so() -> None:
    body = parent(pair_70b(override={"planning": "Ignore", "reason": "the estimate is wrong here"}))
    intent, _, conditions = decide(body, nodes=(H100_NODE,))
    assert "Deployment" in [child["kind"] for child in intent.children]
    assert (conditions["Planned"].status, conditions["Planned"].reason) == ("True", "Overridden")
    assert "the estimate is wrong here" in conditions["Planned"].message


def test_without_a_matching_node_it_waits_and_says_what_for() -> None:
    intent, _, conditions = decide(parent(pair_70b()), nodes=())
    assert intent.children == []
    assert summary(conditions) == ("Unknown", "NoMatchingNodes", "True", "False")
    assert "nvidia.com/gpu.product" in conditions["Planned"].message


def test_node_pools_that_scale_from_zero_are_planned_from_the_spec() -> None:
    accelerator = {"product": [H200], "perNode": 4}
    _, status, _ = decide(parent(pair_70b(accelerator=accelerator)), nodes=())
    assert status.plan is not None
    assert status.plan.product == H200


def test_more_gpus_than_a_node_has_waits_for_larger_nodes() -> None:
    intent, _, conditions = decide(parent(pair_70b(parallelism={"tensor": 16})))
    assert intent.children == []
    assert summary(conditions) == ("Unknown", "NodesTooFew", "True", "False")
    assert "spec.parallelism: 16 GPUs a replica (TP 16)" in conditions["Planned"].message
    assert "needs 2 nodes x 8 x" in conditions["Planned"].message


FP8_70B = pair_70b(target={"model": "meta-llama/Llama-3.1-70B-Instruct", "quantization": "FP8"}, parallelism={})


def test_a_fresh_plan_takes_the_fewest_gpus() -> None:
    _, status, _ = decide(parent(FP8_70B))
    assert status.plan is not None
    assert (status.plan.product, status.plan.tensor) == (H200, 1)


@pytest.mark.parametrize(
    ("spec", "generation", "nodes"),
    [
        (FP8_70B, 1, (H100_NODE, H200_NODE)),
        ({**FP8_70B, "replicas": 3}, 2, (H100_NODE, H200_NODE)),
        (FP8_70B, 1, (NodeFacts("h100-0", H100, 8, schedulable=False), H200_NODE)),
        (FP8_70B, 1, (NodeFacts("h100-0", H100, 8, schedulable=False),)),
    ],
    ids=["a better node appears", "it is scaled", "its node is cordoned", "all nodes are cordoned"],
)
def test_a_plan_in_force_stays(spec: dict[str, Any], generation: int, nodes: tuple[NodeFacts, ...]) -> None:
    _, before, _ = decide(parent(FP8_70B), nodes=(H100_NODE,))
    assert before.plan is not None
    assert (before.plan.product, before.plan.tensor) == (H100, 2)
    status = before.model_dump(by_alias=True, mode="json", exclude_none=True)
    _, kept, _ = decide(parent(spec, generation=generation, status=status), nodes=nodes)
    assert kept.plan is not None
    assert (kept.plan.product, kept.plan.tensor) == (H100, 2)


@pytest.mark.parametrize(
    ("changes", "nodes"),
    [
        ({"parallelism": {"tensor": 4}}, (H100_NODE, H200_NODE)),
        ({"accelerator": {"product": [H200]}}, (H100_NODE, H200_NODE)),
        ({}, (H200_NODE,)),
        ({"serving": {"maxModelLen": 131_072, "minConcurrency": 8}}, (H100_NODE, H200_NODE)),
    ],
    ids=["other parallelism", "other product", "its nodes are gone", "it fits no more"],
)
def test_a_plan_gives_way_to_what_the_spec_or_the_cluster_says(
    changes: dict[str, Any], nodes: tuple[NodeFacts, ...]
) -> None:
    _, before, _ = decide(parent(FP8_70B), nodes=(H100_NODE,))
    status = before.model_dump(by_alias=True, mode="json", exclude_none=True)
    _, after, conditions = decide(parent({**FP8_70B, **changes}, generation=2, status=status), nodes=nodes)
    assert after.plan is not None
    assert (after.plan.product, after.plan.tensor) != (H100, 2)
    assert conditions["Planned"].status == "True"


BAD_SPECS = {
    "three ways do not divide 64 heads": (pair_70b(parallelism={"tensor": 3}), "spec.parallelism.tensor", "64"),
    "longer than the model": (
        pair_70b(serving={"maxModelLen": 262_144}),
        "spec.serving.maxModelLen",
        "131072",
    ),
    "removed flag": (
        pair_70b(engine={"extraArgs": ["--num-lookahead-slots", "4"]}),
        "spec.engine.extraArgs[0]",
        "remove it",
    ),
    "contradicts a field": (
        pair_70b(engine={"extraArgs": ["--tensor-parallel-size=4"]}),
        "spec.engine.extraArgs[0]",
        "spec.parallelism.tensor",
    ),
    "other vocabulary": (
        pair_70b(
            speculation={
                "method": "draft_model",
                "numSpeculativeTokens": 5,
                "draft": tiny_cpu()["speculation"]["draft"],
            }
        ),
        "spec.speculation.draft.model",
        "vocabulary",
    ),
    "unknown product": (pair_70b(accelerator={"product": ["NVIDIA-X"]}), "spec.accelerator.product[0]", H100),
    "int8 of a bf16 checkpoint": (
        pair_70b(target={"model": "meta-llama/Llama-3.1-70B-Instruct", "quantization": "INT8"}),
        "spec.target.quantization",
        "checkpoint",
    ),
    "protected part of the pod": (
        pair_70b(podTemplate={"spec": {"containers": [{"name": "engine", "command": ["sh"]}]}}),
        "spec.podTemplate.spec.containers[0].command",
        "extraArgs",
    ),
    "CPU without an image": (tiny_cpu(engine={}), "spec.engine.image", "name one"),
    "old vLLM": (pair_70b(engine={"version": "0.3"}), "spec.engine.version", "write 0.28 or newer"),
}


@pytest.mark.parametrize(("spec", "field", "fix"), BAD_SPECS.values(), ids=BAD_SPECS)
def test_what_only_the_user_can_mend_is_named_with_its_fix(spec: dict[str, Any], field: str, fix: str) -> None:
    intent, _, conditions = decide(parent(spec))
    assert intent.children == []
    assert not isinstance(intent.course, Launch)
    assert conditions["Accepted"].status == "False"
    assert field in conditions["Accepted"].message
    assert fix in conditions["Accepted"].message
    assert summary(conditions)[0] == "False"
    assert summary(conditions)[2:] == ("False", "True")


def test_all_problems_are_told_at_once() -> None:
    spec = pair_70b(parallelism={"tensor": 3}, engine={"extraArgs": ["--swap-space", "4"]})
    _, _, conditions = decide(parent(spec))
    assert "spec.parallelism.tensor" in conditions["Accepted"].message
    assert "spec.engine.extraArgs[0]" in conditions["Accepted"].message


def test_the_first_status_has_ready_and_observed_generation() -> None:
    _, status, conditions = decide(parent(tiny_cpu(), generation=7))
    assert status.observed_generation == 7
    assert all(condition.observed_generation == 7 for condition in status.conditions)
    assert summary(conditions) == ("Unknown", "Starting", "True", "False")


def test_engines_that_serve_without_traffic_are_ready() -> None:
    seen = Observation(SERVING, [], {"llama-1": reading()})
    _, status, conditions = decide(parent(tiny_cpu()), seen)
    assert summary(conditions) == ("True", "Serving", "False", "False")
    assert (conditions["SpeculationActive"].status, conditions["SpeculationActive"].reason) == ("Unknown", "NoTraffic")
    assert conditions["BudgetAccurate"].status == "True"
    assert status.plan is not None
    assert status.observed is not None
    assert status.observed.kv_cache_tokens == status.plan.kv_cache_tokens == 419_328


def test_drafting_is_proven_with_its_figures() -> None:
    seen = Observation(SERVING, [], {"llama-1": reading(speculation=drafted(100, 213), generation_tokens=313)})
    _, status, conditions = decide(parent(tiny_cpu()), seen)
    assert conditions["SpeculationActive"].status == "True"
    assert status.observed is not None
    assert (status.observed.acceptance, status.observed.mean_acceptance_length) == ("71%", "3.13")


def test_the_figures_of_several_engines_are_weighed_by_their_work() -> None:
    seen = {"a": reading(speculation=drafted(100, 30)), "b": reading(speculation=drafted(300, 270), kv_cache_tokens=9)}
    _, status, _ = decide(parent(tiny_cpu()), Observation(SERVING, [], seen))
    assert status.observed is not None
    assert (status.observed.engines, status.observed.acceptance, status.observed.kv_cache_tokens) == (2, "25%", 9)


def test_a_busy_engine_that_misses_a_question_keeps_what_it_proved() -> None:
    proven = {"llama-1": reading(speculation=drafted(100, 213), generation_tokens=313)}
    _, before, _ = decide(parent(tiny_cpu()), Observation(SERVING, [], proven))
    later = parent(tiny_cpu(), status=before.model_dump(by_alias=True, mode="json", exclude_none=True))
    silent = {"llama-1": Unreachable("/metrics did not answer (TimeoutError)")}
    _, missed, _ = decide(later, Observation(SERVING, [], silent, silent_rounds=2))
    assert missed == before
    _, _, conditions = decide(later, Observation(SERVING, [], silent, silent_rounds=3))
    assert conditions["SpeculationActive"].reason == "Unreachable"


def test_ngram_that_finds_nothing_to_propose_is_no_fault() -> None:
    spec = tiny_cpu(speculation={"method": "ngram", "numSpeculativeTokens": 3})
    _, _, conditions = decide(parent(spec), Observation(SERVING, [], {"llama-1": reading(generation_tokens=500)}))
    assert conditions["SpeculationActive"].reason == "NoMatches"
    assert summary(conditions) == ("True", "Serving", "False", "False")


def test_pods_of_an_earlier_template_say_nothing_of_this_spec() -> None:
    def annotated(value: str) -> dict[str, Any]:
        return {"metadata": {"annotations": {"specdecode.io/template-hash": value}}}

    live = {"kind": "Deployment", "metadata": {}, "spec": {"template": annotated("new")}}
    assert current_pods([annotated("old"), annotated("new")], live) == [annotated("new")]


def test_an_old_engine_that_still_serves_does_not_make_a_rollout_complete() -> None:
    rolling = deployment(replicas=3, updated=2, available=2)
    _, _, conditions = decide(parent(tiny_cpu(replicas=2)), Observation(rolling))
    assert summary(conditions)[0] == "Unknown"


def test_fields_of_a_newer_operator_are_passed_over() -> None:
    spec = {**tiny_cpu(), "fieldOfTomorrow": 1}
    _, before, conditions = decide(parent(spec))
    assert conditions["Accepted"].status == "True"
    status = {**before.model_dump(by_alias=True, mode="json", exclude_none=True), "tomorrow": 1}
    assert read_parent(parent(spec, status=status)).status == before


def test_sizes_that_are_impossible_together_are_refused() -> None:
    spec = tiny_cpu()
    huge = {**spec["target"]["config"], "hidden_size": 2**20, "num_hidden_layers": 2000, "intermediate_size": 2**24}
    spec["target"] = {"model": "pair/target", "config": huge}
    _, _, conditions = decide(parent(spec))
    assert conditions["Accepted"].status == "False"
    assert "spec.target.config" in conditions["Accepted"].message


@pytest.mark.parametrize(
    "engine",
    [reading(speculation=None), reading(generation_tokens=500)],
    ids=["no counters", "generates without drafts"],
)
def test_an_engine_that_does_not_draft_is_caught(engine: EngineReading) -> None:
    _, _, conditions = decide(parent(tiny_cpu()), Observation(SERVING, [], {"llama-1": engine}))
    assert conditions["SpeculationActive"].status == "False"
    assert conditions["SpeculationActive"].reason == "NotDrafting"
    assert summary(conditions) == ("True", "SpeculationInactive", "False", "False")


def test_a_schedule_that_turns_drafting_off_is_named_where_nothing_is_drafted() -> None:
    spec = tiny_cpu()
    spec["speculation"]["numSpeculativeTokensByBatchSize"] = [{"from": 1, "to": 16, "numSpeculativeTokens": 0}]
    idle = Observation(SERVING, [], {"llama-1": reading(generation_tokens=500)})
    _, _, conditions = decide(parent(spec), idle)
    assert conditions["SpeculationActive"].reason == "NotDrafting"
    assert "numSpeculativeTokensByBatchSize" in conditions["SpeculationActive"].message


def test_speculation_that_was_not_asked_for_is_no_fault() -> None:
    spec = tiny_cpu()
    del spec["speculation"]
    _, _, conditions = decide(parent(spec), Observation(SERVING, [], {"llama-1": reading(speculation=None)}))
    assert conditions["SpeculationActive"].reason == "Disabled"
    assert summary(conditions) == ("True", "Serving", "False", "False")


def test_an_engine_that_does_not_answer_is_said_to_be_unreachable() -> None:
    seen = Observation(SERVING, [], {"llama-1": Unreachable("/metrics did not answer (ConnectTimeout)")})
    _, status, conditions = decide(parent(tiny_cpu()), seen)
    assert conditions["SpeculationActive"].reason == "Unreachable"
    assert "ConnectTimeout" in conditions["SpeculationActive"].message
    assert status.observed is None


def test_on_cpu_every_missing_token_is_told_for_nothing_there_is_estimated() -> None:
    seen = Observation(SERVING, [], {"llama-1": reading(kv_cache_tokens=419_200)})
    _, _, conditions = decide(parent(tiny_cpu()), seen)
    assert conditions["BudgetAccurate"].reason == "LessThanPromised"
    assert "config" in conditions["BudgetAccurate"].message


def test_engines_that_go_on_serving_behind_a_bad_spec_are_told() -> None:
    bad = tiny_cpu(engine={"image": "localhost/engine:1", "extraArgs": ["--swap-space=4"]})
    _, _, conditions = decide(parent(bad), Observation(SERVING))
    assert (conditions["Available"].status, conditions["Available"].reason) == ("True", "EarlierEnginesServe")
    assert summary(conditions) == ("False", "Invalid", "False", "True")


def test_a_block_size_without_a_kernel_is_refused_on_gpu_too() -> None:
    _, _, conditions = decide(parent(pair_70b(serving={"maxModelLen": 8192, "blockSize": 7})))
    assert "spec.serving.blockSize: 7: must be a multiple of 16" in conditions["Accepted"].message


def test_less_kv_cache_than_promised_is_told() -> None:
    seen = Observation(SERVING, [], {"llama-1": reading(kv_cache_tokens=1000)})
    _, _, conditions = decide(parent(tiny_cpu()), seen)
    assert (conditions["BudgetAccurate"].status, conditions["BudgetAccurate"].reason) == ("False", "LessThanPromised")


@pytest.mark.parametrize(
    ("changes", "reason"), [({"suspend": True}, "Suspended"), ({"replicas": 0}, "ScaledToZero")], ids=str
)
def test_no_engine_is_ready_where_none_is_wanted(changes: dict[str, Any], reason: str) -> None:
    intent, _, conditions = decide(parent(tiny_cpu(**changes)))
    assert intent.children[-1]["spec"]["replicas"] == 0
    assert summary(conditions) == ("True", reason, "False", "False")


def test_replicas_lost_after_having_been_ready() -> None:
    _, before, _ = decide(parent(tiny_cpu()), Observation(SERVING, [], {"llama-1": reading()}))
    later = parent(tiny_cpu(), status=before.model_dump(by_alias=True, mode="json", exclude_none=True))
    lost = deployment(replicas=1, updated=1, available=0)
    killed = pod(containerStatuses=[ended(137, "Killed", reason="OOMKilled")])
    _, _, conditions = decide(later, Observation(lost, [killed]))
    assert summary(conditions) == ("False", "ReplicasLost", "True", "False")
    assert "memory" in conditions["Ready"].message


def test_a_new_spec_that_rolls_out_is_no_loss() -> None:
    _, before, _ = decide(parent(tiny_cpu()), Observation(SERVING, [], {"llama-1": reading()}))
    changed = parent(tiny_cpu(), generation=2, status=before.model_dump(by_alias=True, mode="json", exclude_none=True))
    _, _, conditions = decide(changed, Observation(deployment(replicas=1, updated=1, available=0)))
    assert summary(conditions)[:2] == ("Unknown", "Starting")


def test_a_deployment_that_lags_behind_its_spec_is_not_ready() -> None:
    stale = deployment(replicas=1, updated=1, available=1, generation=2, observed=1)
    _, _, conditions = decide(parent(tiny_cpu()), Observation(stale))
    assert summary(conditions)[0] == "Unknown"


TROUBLES = {
    "missing secret": (
        pod(containerStatuses=[waiting("CreateContainerConfigError", 'secret "key" not found')]),
        "WaitingForSecret",
        'secret "key" not found',
    ),
    "missing claim": (
        pod(conditions=[{"type": "PodScheduled", "status": "False", "message": 'persistentvolumeclaim "m" not found'}]),
        "WaitingForVolume",
        'persistentvolumeclaim "m" not found',
    ),
    "no room": (
        pod(conditions=[{"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}]),
        "Unschedulable",
        "0/3 nodes",
    ),
    "no image": (pod(containerStatuses=[waiting("ImagePullBackOff", "not found")]), "ImagePullFailed", "i:1"),
    "crash": (pod(containerStatuses=[ended(1, "Traceback\nValueError: no")]), "EngineFailed", "ValueError: no"),
    "download": (
        pod(initContainerStatuses=[ended(1, "401", container="download-target")]),
        "DownloadFailed",
        "download-target",
    ),
}


@pytest.mark.parametrize(("engine_pod", "reason", "words"), TROUBLES.values(), ids=TROUBLES)
def test_what_holds_an_engine_up_is_named(engine_pod: dict[str, Any], reason: str, words: str) -> None:
    starting = deployment(replicas=1, updated=1, available=0)
    _, _, conditions = decide(parent(tiny_cpu()), Observation(starting, [engine_pod]))
    assert summary(conditions) == ("Unknown", reason, "True", "False")
    assert words in conditions["Ready"].message
    assert conditions["Available"].status == "False"


def test_arguments_that_the_engine_refuses_are_the_users_to_mend() -> None:
    refused = pod(containerStatuses=[ended(2, "usage: vllm\nvllm: error: unrecognized arguments: --x")])
    starting = deployment(replicas=1, updated=1, available=0)
    _, _, conditions = decide(parent(tiny_cpu()), Observation(starting, [refused]))
    assert summary(conditions) == ("False", "EngineRefusesArguments", "False", "True")
    assert "--x" in conditions["Ready"].message


def status_with_acceptance(accepted: int, *, previous: SpecDecodeDeploymentStatus | None, rested: bool) -> str:
    body = parent(
        tiny_cpu(), status=previous.model_dump(by_alias=True, mode="json", exclude_none=True) if previous else None
    )
    readings = {"llama-1": reading(speculation=drafted(100, accepted), generation_tokens=300)}
    _, status, _ = decide(body, Observation(SERVING, [], readings, rested))
    assert status.observed is not None
    return status.observed.acceptance or ""


def test_figures_move_only_by_steps_and_only_after_a_rest() -> None:
    _, first, _ = decide(
        parent(tiny_cpu()),
        Observation(SERVING, [], {"llama-1": reading(speculation=drafted(100, 150), generation_tokens=250)}),
    )
    assert status_with_acceptance(153, previous=first, rested=True) == "50%", "one point is noise"
    assert status_with_acceptance(180, previous=first, rested=False) == "50%", "not within a minute"
    assert status_with_acceptance(180, previous=first, rested=True) == "60%"


def test_transition_times_stand_still_while_a_status_does() -> None:
    _, first, _ = decide(parent(tiny_cpu()), Observation(SERVING, [], {"llama-1": reading()}))
    owner = read_parent(parent(tiny_cpu(), status=first.model_dump(by_alias=True, mode="json", exclude_none=True)))
    lost = Observation(deployment(replicas=1, updated=1, available=0))
    later = compose_status(owner, intend(owner, ()), lost, NOW + timedelta(hours=1))
    times = {condition.type: condition.last_transition_time for condition in later.conditions}
    assert times["Ready"] == "2026-01-01T01:00:00Z"
    assert times["Planned"] == "2026-01-01T00:00:00Z"


def test_a_reconcile_that_finds_nothing_new_says_nothing_new() -> None:
    seen = Observation(SERVING, [], {"llama-1": reading()})
    _, first, _ = decide(parent(tiny_cpu()), seen)
    again = read_parent(parent(tiny_cpu(), status=first.model_dump(by_alias=True, mode="json", exclude_none=True)))
    assert compose_status(again, intend(again, ()), seen, NOW + timedelta(hours=1)) == again.status
    assert news(first.conditions, first.conditions) == []


def test_people_hear_of_ready_and_of_proofs_but_not_of_every_helper() -> None:
    _, starting, _ = decide(parent(tiny_cpu()))
    _, serving, _ = decide(parent(tiny_cpu()), Observation(SERVING, [], {"llama-1": reading()}))
    assert [condition.type for condition in news([], starting.conditions)] == ["Ready", "Planned"]
    assert [c.type for c in news(starting.conditions, serving.conditions)] == ["Ready", "BudgetAccurate"]
