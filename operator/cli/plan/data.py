"""Convert plans to the data of `-o json` and `-o yaml`."""

from typing import Any

from specdecode_operator.cli.outputs import Output, PerGpu, ProblemOutput, Verdict, filled, problems_data
from specdecode_operator.cli.plan.answers import Answer, Answers, Candidate
from specdecode_operator.sizing.plan import Fix
from specdecode_operator.sizing.quantization_matrix import MatrixRow


class CandidateOutput(Output):
    """GPUs, split and precisions with which a pair could run."""

    product: str
    """GPU product, CPU, or the memory size given with --gpu."""
    gpus: int
    """GPUs per replica; 0 on CPU."""
    nodes: int
    """Nodes per replica."""
    tensor: int
    """Tensor parallelism."""
    pipeline: int
    """Pipeline stages."""
    data: int
    """Data-parallel copies. Each has all weights except the experts."""
    expert: bool
    """Whether experts are distributed over the GPUs (expert parallelism)."""
    target_precision: str
    """Precision of the target."""
    draft_precision: str | None
    """Precision of the draft; null if no model drafts."""
    verdict: Verdict
    """Whether the pair fits."""
    binding_term: str | None
    """Term that prevents Fits; null if the pair fits."""
    per_gpu: PerGpu
    """Budget of each GPU."""
    needed_kv_bytes: int
    """Minimum size of the KV cache."""
    margin_bytes: int
    """Memory that must be to spare for Fits, because estimates may be wrong."""
    estimated_margin_bytes: int
    """Part of the margin that is added for estimated models."""
    calibrated: bool
    """Whether public logs of this vLLM version and GPU confirm the estimates."""
    uncalibrated_gpu: bool
    """Whether no public log of this GPU confirms the estimates. The margin is then wider."""
    correction_bytes: int
    """Correction of the estimates by measurements."""
    calibration: str | None
    """Measurements that correct the estimates; null if none do."""
    kv_bytes_per_token: int
    """KV cache of one token in target and draft."""
    kv_cache_tokens: int
    """Tokens that the KV cache of each data-parallel copy holds, before the margin."""
    max_concurrency: float
    """Requests of full length that the KV cache of each copy holds."""


class PrecisionOutput(Output):
    """One combination of precisions on one product and split."""

    target: str
    """Precision of the target."""
    draft: str | None
    """Precision of the draft; null if no model drafts."""
    kv_cache_dtype: str
    """Data type of the KV cache: auto or fp8."""
    product: str
    """GPU product."""
    gpus: int
    """GPUs per replica."""
    tensor: int
    """Tensor parallelism."""
    verdict: Verdict
    """Whether the pair fits."""
    launchable: bool
    """Whether vLLM can start with these precisions, regardless of the memory."""
    reason: str | None
    """Reason why vLLM cannot start; null if it can."""
    available_kv: int | None
    """KV cache of each GPU in bytes; null if the models cannot be split like this."""
    kv_cache_tokens: int | None
    """Tokens that the KV cache of each data-parallel copy holds."""
    max_concurrency: float | None
    """Requests of full length that the KV cache of each copy holds."""


class ChangeOutput(Output):
    """A field and its new value."""

    field: str
    """Path in the object."""
    value: Any
    """New value; null to remove the field."""


class FixOutput(Output):
    """A change with which the pair fits."""

    change: str
    """Fields and new values as text."""
    changes: list[ChangeOutput]
    """Fields and new values."""
    verdict: Verdict
    """Verdict after the change."""
    kv_cache_tokens: int
    """Tokens that the KV cache of each data-parallel copy holds after the change."""
    max_concurrency: float
    """Requests of full length that the KV cache of each copy holds after the change."""


class UnknownModelOutput(Output):
    """A model without known facts."""

    model: str
    """Id or path of the model."""
    revision: str | None
    """Requested revision; null for the newest."""


class ReadModelOutput(UnknownModelOutput):
    """A model that was read from the hub."""

    commit: str | None
    """Commit that was read."""


class ModelOutput(Output):
    """A model that was sized, and the accuracy of its size."""

    role: str
    """target or draft."""
    model: str
    """Id or path of the model."""
    knowledge: str
    """Accuracy of its size: exact, estimated or assumed."""
    estimated_because: str | None
    """Field of config.json that sizing does not implement; null if the model is not estimated."""


class ObjectOutput(Output):
    """Plan of one object."""

    name: str
    """Name of the object."""
    namespace: str | None
    """Namespace of the object; null if it has none."""
    place: str
    """File, and number of the document in it."""
    verdict: Verdict
    """Verdict of the best candidate, or why there is no candidate."""
    explanation: str
    """Reason for the verdict in one sentence."""
    choice: str | None
    """Reason for the precisions; null if there was no choice."""
    models: list[ModelOutput]
    """Target and draft; empty if the object is invalid or a model is unknown."""
    candidates: list[CandidateOutput]
    """All candidates, best first."""
    precisions: list[PrecisionOutput]
    """Every precision of target, draft and KV cache on each product and split."""
    fixes: dict[str, list[FixOutput]]
    """Changes, smallest first, by the candidate that does not fit."""
    advice: list[str]
    """Warnings, advice and notes."""
    problems: list[ProblemOutput]
    """Invalid fields and unknown models."""
    unknown_models: list[UnknownModelOutput]
    """Models without known facts."""
    read_models: list[ReadModelOutput]
    """Models that --hub read."""


class PlanOutput(Output):
    """Output of `plan`. Sizes are in bytes."""

    verdict: Verdict
    """The worst verdict of all objects; Invalid if a file could not be read or there is no object."""
    objects: list[ObjectOutput]
    """One entry per object, in the order of reading."""
    errors: list[str]
    """Files and documents that could not be read, with the reason."""


def plan_data(result: Answers) -> PlanOutput:
    """Return the data of all objects with every candidate."""
    return PlanOutput(
        verdict=result.verdict,
        objects=[_object(answer) for answer in result.answers],
        errors=[str(error) for error in result.errors],
    )


def _object(answer: Answer) -> ObjectOutput:
    pair = answer.facts and answer.facts.pair
    sized = {"target": pair.target, "draft": pair.draft} if pair else {}
    document = answer.document
    return ObjectOutput(
        name=document.name,
        namespace=document.namespace,
        place=document.place,
        verdict=answer.verdict,
        explanation=answer.explanation,
        choice=answer.choice or None,
        models=[
            ModelOutput(
                role=role,
                model=model.name,
                knowledge=model.knowledge.value,
                estimated_because=model.estimated_because or None,
            )
            for role, model in sized.items()
            if model is not None
        ],
        candidates=[_candidate(candidate) for candidate in answer.matrix],
        precisions=[_precision(row) for row in answer.precisions],
        fixes={each.label: list(map(_fix, each.fixes)) for each in answer.candidates if each.fixes},
        advice=list(answer.advice),
        problems=problems_data(answer.problems),
        unknown_models=[
            UnknownModelOutput(model=each.source.model, revision=each.source.revision) for each in answer.unknown
        ],
        read_models=[
            ReadModelOutput(model=source.model, revision=source.revision, commit=checkpoint.commit)
            for source, checkpoint in answer.known.items()
        ],
    )


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
    return filled(
        PrecisionOutput,
        row,
        target=row.target_precision.value,
        draft=row.draft_precision and row.draft_precision.value,
        kv_cache_dtype=row.kv_cache_dtype.value,
        verdict=row.verdict.value,
        available_kv=budget and budget.available_kv_bytes,
        kv_cache_tokens=budget and budget.kv_cache_tokens,
        max_concurrency=budget and budget.max_concurrency,
    )


def _candidate(candidate: Candidate) -> CandidateOutput:
    budget, split = candidate.budget, candidate.split
    return filled(
        CandidateOutput,
        budget,
        product=candidate.product,
        gpus=candidate.gpus,
        nodes=candidate.nodes,
        tensor=split.tensor,
        pipeline=split.pipeline,
        data=split.data,
        expert=split.expert,
        target_precision=candidate.target_precision.value,
        draft_precision=candidate.draft_precision and candidate.draft_precision.value,
        verdict=candidate.verdict,
        binding_term=budget.binding_term and budget.binding_term.value,
        per_gpu=PerGpu(**{name: getattr(budget, f"{name}_bytes") for name in PerGpu.model_fields}),
    )
