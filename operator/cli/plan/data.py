"""Answers as data, for -o json and -o yaml: the keys that CI reads."""

from specdecode_operator.cli.outputs.base import PerGpu, ProblemOutput
from specdecode_operator.cli.outputs.plan import (
    CandidateOutput,
    ChangeOutput,
    FixOutput,
    ModelOutput,
    ObjectOutput,
    PlanOutput,
    PrecisionOutput,
    ReadModelOutput,
    UnknownModelOutput,
)
from specdecode_operator.cli.plan.answers import Answer, Answers, Candidate
from specdecode_operator.problems import Problem
from specdecode_operator.sizing.choice.plan import Fix
from specdecode_operator.sizing.choice.quantization_matrix import MatrixRow


def plan_data(result: Answers) -> PlanOutput:
    """Return everything that `plan` knows: all candidates, whatever the table shows. Sizes are in bytes."""
    return PlanOutput(
        verdict=result.verdict,
        objects=[_object(answer) for answer in result.answers],
        errors=[str(error) for error in result.errors],
    )


def problem_data(problem: Problem) -> ProblemOutput:
    """Return a problem as data."""
    return ProblemOutput(field=problem.field, value=problem.value, message=problem.message)


def _object(answer: Answer) -> ObjectOutput:
    return ObjectOutput(
        name=answer.document.name,
        namespace=answer.document.namespace,
        place=answer.document.place,
        verdict=answer.verdict,
        explanation=answer.explanation,
        choice=answer.choice or None,
        models=_models(answer),
        candidates=[_candidate(candidate) for candidate in answer.matrix],
        precisions=[_precision(row) for row in answer.precisions],
        fixes={
            candidate.label: [_fix(fix) for fix in candidate.fixes]
            for candidate in answer.candidates
            if candidate.fixes
        },
        advice=list(answer.advice),
        problems=[problem_data(problem) for problem in answer.problems],
        unknown_models=[
            UnknownModelOutput(model=each.source.model, revision=each.source.revision) for each in answer.unknown
        ],
        read_models=[
            ReadModelOutput(model=source.model, revision=source.revision, commit=checkpoint.commit)
            for source, checkpoint in answer.known.items()
        ],
    )


def _models(answer: Answer) -> list[ModelOutput]:
    if answer.facts is None:
        return []
    pair = answer.facts.pair
    sized = (("target", pair.target), ("draft", pair.draft))
    return [
        ModelOutput(
            role=role,
            model=model.name,
            knowledge=model.knowledge.value,
            estimated_because=model.estimated_because or None,
        )
        for role, model in sized
        if model is not None
    ]


def _fix(fix: Fix) -> FixOutput:
    return FixOutput(
        change=fix.change,
        changes=[ChangeOutput(field=f"spec.{each.field}", value=each.value) for each in fix.changes],
        verdict=fix.verdict.value,
        kv_cache_tokens=fix.tokens,
        max_concurrency=fix.concurrency,
    )


def _precision(row: MatrixRow) -> PrecisionOutput:
    budget = row.budget
    return PrecisionOutput(
        target=row.target_precision.value,
        draft=None if row.draft_precision is None else row.draft_precision.value,
        kv_cache_dtype=row.kv_cache_dtype.value,
        product=row.product,
        gpus=row.gpus,
        tensor=row.tensor,
        verdict=row.verdict.value,
        launchable=row.launchable,
        reason=row.reason,
        available_kv=None if budget is None else budget.available_kv_bytes,
        kv_cache_tokens=None if budget is None else budget.kv_cache_tokens,
        max_concurrency=None if budget is None else budget.max_concurrency,
    )


def _candidate(candidate: Candidate) -> CandidateOutput:
    budget = candidate.budget
    return CandidateOutput(
        product=candidate.product,
        gpus=candidate.gpus,
        nodes=candidate.nodes,
        tensor=candidate.tensor,
        pipeline=candidate.split.pipeline,
        data=candidate.split.data,
        expert=candidate.split.expert,
        target_precision=candidate.target_precision.value,
        draft_precision=None if candidate.draft_precision is None else candidate.draft_precision.value,
        verdict=candidate.verdict,
        binding_term=None if budget.binding_term is None else budget.binding_term.value,
        per_gpu=PerGpu(
            total=budget.total_bytes,
            requested=budget.requested_bytes,
            target_weights=budget.target_weights_bytes,
            draft_weights=budget.draft_weights_bytes,
            state=budget.state_bytes,
            activation=budget.activation_bytes,
            cuda_graphs=budget.cuda_graphs_bytes,
            non_torch=budget.non_torch_bytes,
            available_kv=budget.available_kv_bytes,
        ),
        needed_kv_bytes=budget.needed_kv_bytes,
        margin_bytes=budget.margin_bytes,
        estimated_margin_bytes=budget.estimated_margin_bytes,
        calibrated=budget.calibrated,
        uncalibrated_gpu=budget.uncalibrated_gpu,
        correction_bytes=budget.correction_bytes,
        calibration=budget.calibration,
        kv_bytes_per_token=budget.kv_bytes_per_token,
        kv_cache_tokens=budget.kv_cache_tokens,
        max_concurrency=budget.max_concurrency,
    )
