"""The answers of `plan` as data for `-o json` and `-o yaml`: the keys that CI reads."""

from typing import Any

from specdecode_operator.cli.outputs import Output, PerGpu, ProblemOutput, Verdict, filled, problems_data
from specdecode_operator.cli.plan.answers import Answer, Answers, Candidate
from specdecode_operator.sizing.plan import Fix
from specdecode_operator.sizing.quantization_matrix import MatrixRow


class CandidateOutput(Output):
    """One place where a pair could run."""

    product: str
    """GPU product, CPU, or the memory that --gpu named."""
    gpus: int
    """GPUs of a replica; 0 on CPU."""
    nodes: int
    """Over how many nodes they lie."""
    tensor: int
    """GPUs that share each layer."""
    pipeline: int
    """Stages of layers."""
    data: int
    """Copies of all but the experts."""
    expert: bool
    """Whether whole experts are spread."""
    target_precision: str
    """What the target is served in."""
    draft_precision: str | None
    """What the draft is served in; null without one."""
    verdict: Verdict
    """Whether it fits there."""
    binding_term: str | None
    """What breaks it; null where it fits."""
    per_gpu: PerGpu
    """The budget of each GPU."""
    needed_kv_bytes: int
    """KV cache without which it does not fit."""
    margin_bytes: int
    """What the verdict keeps back because estimates err."""
    estimated_margin_bytes: int
    """Part of it that is there because a model is estimated."""
    calibrated: bool
    """Whether public logs of this vLLM version and of this GPU confirm the estimates."""
    uncalibrated_gpu: bool
    """Whether no public log of this GPU confirms the estimates; the margin is wider then."""
    correction_bytes: int
    """By how much measurements change the estimates."""
    calibration: str | None
    """Which measurements those are; null without any."""
    kv_bytes_per_token: int
    """KV cache of one token in target and draft."""
    kv_cache_tokens: int
    """Tokens that the KV cache of each data-parallel copy holds, before the margin."""
    max_concurrency: float
    """Requests of full length that it holds, in each copy."""


class PrecisionOutput(Output):
    """One combination of precisions at one place."""

    target: str
    """Precision of the target."""
    draft: str | None
    """Precision of the draft; null without one."""
    kv_cache_dtype: str
    """auto or fp8."""
    product: str
    """GPU product."""
    gpus: int
    """GPUs of a replica."""
    tensor: int
    """GPUs that share each layer."""
    verdict: Verdict
    """Whether it fits there."""
    launchable: bool
    """Whether vLLM could be started so, whatever the memory."""
    reason: str | None
    """Why not; null where it could."""
    available_kv: int | None
    """KV cache of each GPU in bytes; null where it cannot be split so."""
    kv_cache_tokens: int | None
    """Tokens that it holds, in each data-parallel copy."""
    max_concurrency: float | None
    """Requests of full length that it holds, in each copy."""


class ChangeOutput(Output):
    """One field and what to write there."""

    field: str
    """Path in the object."""
    value: Any
    """New value; null: the field is to be removed."""


class FixOutput(Output):
    """A change that makes it fit."""

    change: str
    """The change in words."""
    changes: list[ChangeOutput]
    """The same, field by field."""
    verdict: Verdict
    """What the plan says then."""
    kv_cache_tokens: int
    """Tokens that the KV cache of each data-parallel copy holds then."""
    max_concurrency: float
    """Requests of full length that it holds then, in each copy."""


class UnknownModelOutput(Output):
    """A model of which nothing is known here."""

    model: str
    """Its id, or its path."""
    revision: str | None
    """The revision that is asked for; null for the newest."""


class ReadModelOutput(UnknownModelOutput):
    """A model that was read from the hub."""

    commit: str | None
    """The commit that was read."""


class ModelOutput(Output):
    """A model that was sized, and how well it is known."""

    role: str
    """target or draft."""
    model: str
    """Its id, or its path."""
    knowledge: str
    """exact, estimated or assumed."""
    estimated_because: str | None
    """The field of config.json that sizing does not implement; null for an exact model."""


class ObjectOutput(Output):
    """What one object comes to."""

    name: str
    """Its name."""
    namespace: str | None
    """Its namespace; null where it says none."""
    place: str
    """File, and number of the document in it."""
    verdict: Verdict
    """That of the best candidate, or why there is none."""
    explanation: str
    """Why, in one sentence."""
    choice: str | None
    """Why these precisions; null where there was nothing to choose."""
    models: list[ModelOutput]
    """Target and draft; empty where the object is invalid or a model is unknown."""
    candidates: list[CandidateOutput]
    """All places that were looked at, the one to choose first."""
    precisions: list[PrecisionOutput]
    """Target, draft and KV cache in every precision, at each place."""
    fixes: dict[str, list[FixOutput]]
    """What to change, smallest change first, by the place where it does not fit."""
    advice: list[str]
    """What is worth knowing although it is no error."""
    problems: list[ProblemOutput]
    """What is invalid."""
    unknown_models: list[UnknownModelOutput]
    """Models of which nothing is known here."""
    read_models: list[ReadModelOutput]
    """Models that --hub read."""


class PlanOutput(Output):
    """The answer of `plan`. Sizes are in bytes."""

    verdict: Verdict
    """The worst of all objects; Invalid where a file could not be read."""
    objects: list[ObjectOutput]
    """One for each object, in the order of reading."""
    errors: list[str]
    """What could not be read."""


def plan_data(result: Answers) -> PlanOutput:
    """Return everything that `plan` knows: all candidates, whatever the table shows. Sizes are in bytes."""
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
