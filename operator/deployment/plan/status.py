"""A plan in the status: `status.plan`, the condition Planned, and what changed."""

from typing import Final

from specdecode_operator.api.status.deployment import GpuMemory, PlanStatus
from specdecode_operator.api.values import METHODS_WITH_LAYERS
from specdecode_operator.deployment.conditions import FALSE, TRUE, ConditionUpdate
from specdecode_operator.deployment.plan.planning import chosen_by
from specdecode_operator.deployment.spec.facts import Facts
from specdecode_operator.sizing.base.devices import find_device, uncalibrated_note
from specdecode_operator.sizing.choice.adaptive_rules import adaptive_doubt
from specdecode_operator.sizing.choice.advice import Advice, Workload, advise, advise_on_nodes
from specdecode_operator.sizing.choice.node_placement import place_phrase
from specdecode_operator.sizing.choice.plan import Plan
from specdecode_operator.sizing.memory.budget import Verdict
from specdecode_operator.vocabulary import FP8_ELEMENT_BYTES, KvCacheDtype

_REHEARSAL: Final = (
    "a recording is replayed (spec.engine.replay): the plan is a rehearsal, and its nodes need not exist"
)

MOST_SENTENCES: Final = 16
"""Fixes, and pieces of advice, that a status holds."""


def plan_status(facts: Facts, plan: Plan) -> PlanStatus:
    """Return the chosen row with its terms, and the advice on it."""
    chosen, budget = plan.chosen, plan.chosen.budget
    return PlanStatus(
        verdict=plan.verdict,
        explanation=plan.explanation,
        product=chosen.product,
        tensor=chosen.tensor,
        pipeline=chosen.spread.pipeline,
        data=chosen.spread.data,
        expert=chosen.spread.expert,
        draft_tensor=chosen.tensor if facts.method in METHODS_WITH_LAYERS else None,
        gpus_per_replica=0 if facts.on_cpu else chosen.gpus,
        nodes_per_replica=chosen.nodes,
        target_quantization=facts.pair.target_precision,
        draft_quantization=facts.pair.draft_precision if facts.pair.draft else None,
        target_knowledge=facts.pair.target.knowledge,
        draft_knowledge=facts.pair.draft.knowledge if facts.pair.draft else None,
        kv_cache_dtype=kv_cache_dtype(facts),
        max_model_len=facts.pair.limits.max_model_len,
        per_gpu=GpuMemory(
            total_bytes=budget.total_bytes,
            requested_bytes=budget.requested_bytes,
            target_weights_bytes=budget.target_weights_bytes,
            draft_weights_bytes=budget.draft_weights_bytes,
            state_bytes=budget.state_bytes,
            activation_bytes=budget.activation_bytes,
            cuda_graphs_bytes=budget.cuda_graphs_bytes,
            non_torch_bytes=budget.non_torch_bytes,
            available_kv_bytes=budget.available_kv_bytes,
            margin_bytes=budget.margin_bytes,
        ),
        kv_bytes_per_token=budget.kv_bytes_per_token,
        kv_cache_tokens=budget.kv_cache_tokens,
        max_concurrency=f"{budget.max_concurrency:.2f}",
        uncalibrated=_uncalibrated(facts, plan),
        chosen_by=chosen_by(facts) if not facts.on_cpu else None,
        fixes=[fix.sentence for fix in plan.fixes][:MOST_SENTENCES] or None,
        advice=[f"{each.sentence} [{each.code}]" for each in plan_advice(facts, plan)][:MOST_SENTENCES] or None,
    )


def _uncalibrated(facts: Facts, plan: Plan) -> str | None:
    """Return what to know of the figures on the chosen GPU; None if public logs or measurements confirm them."""
    device = find_device(plan.chosen.product, facts.spec.accelerator.memory_gib_per_gpu)
    if device is None or plan.chosen.budget.calibration is not None:
        return None
    notes = [uncalibrated_note(device), adaptive_doubt(device.product, facts.pair)]
    return "; ".join(filter(None, notes)) or None


def kv_cache_dtype(facts: Facts) -> str:
    """Return the type that the KV cache has: what serving.kvCacheDtype says, or else the checkpoint, or the model."""
    asked = facts.spec.serving.kv_cache_dtype
    if asked is not KvCacheDtype.AUTO:
        return asked.value
    held = facts.pair.target.cache_element_bytes
    return "fp8" if held == FP8_ELEMENT_BYTES else "auto"


def plan_advice(facts: Facts, plan: Plan) -> tuple[Advice, ...]:
    """Return the advice on the chosen row; none on CPU, and where it does not fit the fixes say more."""
    device = find_device(plan.chosen.product, facts.spec.accelerator.memory_gib_per_gpu)
    if device is None or plan.verdict is Verdict.DOES_NOT_FIT:
        return ()
    advice = advise(facts.pair, device, plan.chosen.split, _workload(facts))
    return (*advice, *advise_on_nodes(plan.chosen))


def _workload(facts: Facts) -> Workload:
    workload = facts.spec.workload
    if workload is None:
        return Workload()
    return Workload(
        kind=workload.kind,
        temperature=float(workload.temperature) if workload.temperature else None,
        primary_slo=workload.primary_slo,
        prompt_tokens=workload.prompt_tokens,
        output_tokens=workload.output_tokens,
    )


def planned_condition(facts: Facts, plan: Plan, passed_over: str = "") -> ConditionUpdate:
    """Return whether there is a plan to launch, and which nodes no plan could use."""
    rehearsal = "" if facts.replay is None else _REHEARSAL
    explanation = "; ".join(filter(None, [plan.explanation, rehearsal, passed_over]))
    if plan.verdict != "DoesNotFit":
        return ConditionUpdate("Planned", TRUE, plan.verdict, explanation)
    override = facts.spec.override
    if override is not None:
        message = f"goes on although it does not fit, because {override.reason!r}: {explanation}"
        return ConditionUpdate("Planned", TRUE, "Overridden", message)
    return ConditionUpdate("Planned", FALSE, "DoesNotFit", explanation)


def plan_change(old: PlanStatus | None, new: PlanStatus | None) -> str | None:
    """Return from what to what a plan changed, in words; None where it did not, or none was before."""
    if old is None or new is None or _place(old) == _place(new):
        return None
    return f"{_place(old)} -> {_place(new)}: {new.explanation}"


def _place(plan: PlanStatus) -> str:
    precisions = " + ".join(filter(None, [plan.target_quantization, plan.draft_quantization]))
    return f"{precisions} on {place_phrase(plan.gpus_per_replica, plan.nodes_per_replica, plan.product)}"
