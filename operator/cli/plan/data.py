"""Convert plans to the data of `-o json` and `-o yaml`, and explain a memory budget term by term for `--explain`."""

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from specdecode_operator.cli.outputs import Output, PerGpu, ProblemOutput, Verdict, filled, problems_data
from specdecode_operator.cli.plan.answers import Answer, Answers, Candidate, PlannedStartup
from specdecode_operator.cli.plan.text import ACCURACY_PAGE, gib, heading, plan_text
from specdecode_operator.cli.terminal import aligned, folded
from specdecode_operator.deployment.spec_facts import Facts
from specdecode_operator.sizing.arithmetic import ceil_div, formula, traced
from specdecode_operator.sizing.devices import MEMORY_FIELD, find_device
from specdecode_operator.sizing.geometry import precision_name
from specdecode_operator.sizing.memory.activation import activation_bytes, on_product, verification_bytes
from specdecode_operator.sizing.memory.budget import (
    Budget,
    adapter_slots_bytes,
    graph_bytes,
    graph_pool_bytes,
    non_torch_bytes,
    slack_bytes,
    tightest_grouping,
    tightest_stage,
)
from specdecode_operator.sizing.memory.buffers import charged_state_bytes
from specdecode_operator.sizing.memory.kv_cache import ALLOCATOR, kv_bytes_per_token, request_blocks, stage_parts
from specdecode_operator.sizing.pair import Pair, Parallelism, loaded_draft
from specdecode_operator.sizing.plan import Fix
from specdecode_operator.sizing.quantization_matrix import MatrixRow
from specdecode_operator.sizing.rank_layers import stages
from specdecode_operator.sizing.startup_time import Seconds

if TYPE_CHECKING:
    from specdecode_operator.importing.foreign import ForeignServer


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
    """Path in the object, or a flag of vLLM if the object is of another project."""
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


class SourceOutput(Output):
    """The object of another project that was planned, in its own fields."""

    kind: str
    """Kind of the object."""
    field: str
    """Field of the container, or of the part of the object that describes the server."""
    role: str | None
    """Side of a prefill/decode split: prefill, decode, or unknown. Null for a server of both phases."""
    unread: list[ProblemOutput]
    """Settings that the plan does not count."""


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


class RangeOutput(Output):
    """Range of an estimated duration in seconds."""

    fastest_s: int
    """Lower end."""
    slowest_s: int
    """Upper end."""


class StartupOutput(Output):
    """Estimated start-up time of an engine at the best place."""

    preparation: RangeOutput
    """Time until the engine's container starts: image pull and downloads."""
    engine: RangeOutput
    """Time from the start of the engine's container until the engine serves."""
    phases: dict[str, RangeOutput]
    """Phases of both, in their order."""
    deadline_s: int | None
    """Time after which the startup probe restarts an engine that does not serve; null for an object of another
    project."""


class ObjectOutput(Output):
    """Plan of one object."""

    name: str
    """Name of the object."""
    namespace: str | None
    """Namespace of the object; null if it has none."""
    place: str
    """File, and number of the document in it."""
    source: SourceOutput | None
    """The object of another project; null for a SpecDecodeDeployment."""
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
    startup: StartupOutput | None
    """Start-up time; null on CPU, for a replay, and if the pair does not fit."""
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
        source=_source(document.foreign),
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
        startup=_startup(answer.startup),
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


def _startup(startup: PlannedStartup | None) -> StartupOutput | None:
    if startup is None:
        return None
    time = startup.time
    return StartupOutput(
        preparation=_range(time.before_s),
        engine=_range(time.engine_s),
        phases={phase.value: _range(each) for phase, each in (*time.before.items(), *time.engine.items())},
        deadline_s=startup.deadline_s,
    )


def _range(seconds: Seconds) -> RangeOutput:
    return RangeOutput(fastest_s=seconds.fastest, slowest_s=seconds.slowest)


def _source(server: "ForeignServer | None") -> SourceOutput | None:
    if server is None:
        return None
    role = None if server.side is None else str(server.side.role or "unknown")
    return SourceOutput(kind=server.kind, field=server.where, role=role, unread=problems_data(server.unread))


def _path(field: str) -> str:
    """Return the path of a field; do not change a flag."""
    return field if field.startswith(("-", "the ")) else f"spec.{field}"


def _fix(fix: Fix) -> FixOutput:
    return FixOutput(
        change=fix.change,
        changes=[ChangeOutput(field=_path(each.field), value=each.value) for each in fix.changes],
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


_WORDS: Final = {
    "max_num_batched_tokens": "tokens",
    "max_num_seqs": "requests",
    "num_heads": "heads",
    "num_kv_heads": "heads",
    "positions": "positions",
    "dtype_bytes": "bytes",
    "element_bytes": "bytes",
    "cache_element_bytes": "byte (fp8 from the checkpoint)",
}
"""Unit of a number, by the name of its field in models and settings."""

_MEASURED: Final = "measured, sizing/data/memory.json"
_LORA: Final = "vLLM, lora/layers, create_lora_weights; lora/punica_wrapper"


class Term(NamedTuple):
    """One term of a memory budget."""

    name: str
    size_bytes: int
    formula: str
    source: str = ""


class Figure(NamedTuple):
    """One step of the computation of the KV cache's capacity."""

    name: str
    formula: str
    result: str


def charged_terms(pair: Pair, split: Parallelism, budget: Budget) -> list[Term]:
    """Return the terms that a GPU's budget covers before the KV cache."""
    number = tightest_stage(pair, split, budget)
    pair, split = _traced(pair, split)
    stage = stages(pair.target, split.pipeline)[number]
    state, activation = charged_state_bytes(pair, split, stage), activation_bytes(pair, split, stage)
    terms = [
        *_weight_terms(pair, split, number),
        *_adapter_terms(adapter_slots_bytes(pair, split, stage)),
        _sourced("state", state, "vLLM, v1/worker/gpu: sample, structured_outputs.py, states.py, spec_decode"),
        _sourced("activation", activation, "vLLM, profile_run and _dummy_run of its model runner"),
        _graphs(pair, graph_bytes(pair, split)),
        _sourced("non-torch", non_torch_bytes(pair, split), _MEASURED),
    ]
    if budget.calibration:
        terms.append(Term("correction", budget.correction_bytes, f"by {budget.calibration}", "the calibration file"))
    return terms


def cpu_terms(pair: Pair, tensor: int, budget: Budget) -> list[Term]:
    """Return the terms of a rank on CPU in addition to the KV cache."""
    weights = _weight_terms(*_traced(pair, Parallelism(tensor)), 0)
    engine = Term("engine", budget.non_torch_bytes, "Python, torch and vLLM's processes", _MEASURED)
    adapters = Term("adapters", budget.adapters_bytes, "slots, and the adapters that the host keeps", _LORA)
    further = [adapters] if budget.adapters_bytes else []
    return [*(term for term in weights if not term.name.endswith(ALLOCATOR)), *further, engine]


def outside_terms(pair: Pair, split: Parallelism, budget: Budget) -> list[Term]:
    """Return the terms outside the budget: free memory, the overrun of verification, and the pool of CUDA graphs."""
    pair, split = _traced(pair, split)
    total, requested = traced((budget.total_bytes, budget.requested_bytes), _WORDS)
    slack, pool = slack_bytes(pair, total, requested, split), graph_pool_bytes(pair, split)
    terms = [_sourced("slack: free outside the budget", slack, _MEASURED)]
    if pair.num_speculative_tokens:
        verified = verification_bytes(pair, split.tensor)
        terms.append(_sourced("overrun: verification", verified, "vLLM, its rejection samplers"))
    return [*terms, *([_sourced("CUDA graphs' pool", pool, _MEASURED)] if pool else [])]


def capacity_figures(pair: Pair, split: Parallelism, budget: Budget) -> list[Figure]:
    """Return the capacity of the KV cache, step by step (vLLM, v1/core/kv_cache_utils.py)."""
    length, block_size = pair.limits.max_model_len, pair.limits.block_size
    grouping = tightest_grouping(pair, split, budget)
    available, blocks, block_bytes = max(0, budget.available_kv_bytes), budget.num_blocks, grouping.bytes_per_block
    per_request, token_bytes = request_blocks(grouping, length), budget.kv_bytes_per_token
    each_group = [group.blocks_per_request(length) for group in grouping.groups]
    of_block = f"pages of the layers that share it; each of {len(each_group)} groups of layers has its own blocks"
    if block_size * token_bytes == block_bytes:
        of_block = f"{block_size} tokens x {token_bytes:,}"
    of_request = f"({' + '.join(f'{each:,}' for each in each_group)}) for {length:,} tokens"
    if ceil_div(length, block_size) == per_request:
        of_request = f"ceil({length:,} / {block_size})"
    of_token = formula(kv_bytes_per_token(*_traced(pair, split)))
    return [
        Figure("bytes of a token", of_token, f"{token_bytes:,}"),
        Figure("bytes of a block", of_block, f"{block_bytes:,}"),
        Figure("blocks", f"floor({available:,} / {block_bytes:,})", f"{blocks:,}"),
        Figure("blocks of a request", of_request, f"{per_request:,}"),
        Figure(f"full requests{split.each_copy}", f"{blocks:,} / {per_request:,}", f"{budget.max_concurrency:,.2f}"),
        Figure(
            f"tokens{split.each_copy}",
            f"floor({blocks:,} / {per_request:,} x {length:,})",
            f"{budget.kv_cache_tokens:,}",
        ),
    ]


def _traced(pair: Pair, split: Parallelism) -> tuple[Pair, Parallelism]:
    """Return copies for which the functions of sizing also record their formulas."""
    asked = "byte (fp8 from serving.kvCacheDtype)" if pair.limits.kv_cache_element_bytes == 1 else "bytes"
    return traced((pair, split), {**_WORDS, "kv_cache_element_bytes": asked})


def _sourced(name: str, size_bytes: int, source: str) -> Term:
    return Term(name, int(size_bytes), formula(size_bytes) if size_bytes else "none", source)


def _weight_terms(pair: Pair, split: Parallelism, number: int) -> list[Term]:
    of_target, of_draft = stage_parts(pair, split, number)
    draft = loaded_draft(pair)
    width = pair.limits.dtype_bytes
    models = [("target", of_target, pair.target_precision), *([("draft", of_draft, draft[1])] if draft else [])]
    terms = []
    for role, parts, precision in models:
        for name, size in parts.items():
            words = f"layers in {precision_name(precision, width)}" if name == "layers" else name
            terms += [_sourced(f"{role}: {words}", size, "vLLM's model classes; config.json")] if size else []
    return terms


def _adapter_terms(size_bytes: int) -> list[Term]:
    return [_sourced("LoRA adapters", size_bytes, _LORA)] if size_bytes else []


def _graphs(pair: Pair, size_bytes: int) -> Term:
    term = _sourced("CUDA graphs", size_bytes, _MEASURED)
    if pair.limits.enforce_eager:
        return term._replace(formula="none: enforceEager is true")
    if not pair.limits.captures_graphs:
        return term._replace(formula="none: cudagraphMode is NONE")
    if not pair.era.charges_graphs:
        return term._replace(formula="outside the budget with this vLLM version")
    return term


class TermOutput(Output):
    """One term of a memory budget."""

    name: str
    """Name of the term. It starts with - or + if the term is subtracted or added, and with = if it is a result."""
    bytes: int
    """Size of the term."""
    formula: str
    """Formula with its numbers."""
    source: str | None
    """Source of the formula; null for plain arithmetic."""


class FigureOutput(Output):
    """One step of the computation of the KV cache's capacity."""

    name: str
    """Name of the figure."""
    formula: str
    """Formula with its numbers."""
    result: str
    """Result as printed."""


class ExplainedOutput(Output):
    """Memory of one object at the best candidate."""

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
    candidate: str | None
    """Best candidate, such as 2 x H200, TP 2; null if there is no candidate."""
    memory: list[TermOutput]
    """Budget and the terms subtracted from it. Like the next two lists, empty if there is no candidate."""
    kv_cache: list[FigureOutput]
    """Capacity of the KV cache, step by step."""
    judged: list[TermOutput]
    """Sizes that the verdict compares."""
    problems: list[ProblemOutput]
    """Invalid fields and unknown models."""


class ExplainOutput(Output):
    """Output of `plan --explain`."""

    objects: list[ExplainedOutput]
    """One entry per object, in the order of reading."""
    errors: list[str]
    """Files and documents that could not be read, with the reason."""


class Explained(NamedTuple):
    """Terms of one candidate."""

    unit: str  # per GPU, per replica or per rank
    counted: list[Term]  # Budget and the terms subtracted from it
    figures: list[Figure]  # Capacity of the KV cache
    judged: list[Term]  # Sizes that the verdict compares


def explained(facts: Facts, chosen: Candidate) -> Explained:
    """Return the terms of the chosen candidate."""
    budget, split, given = chosen.budget, chosen.split, facts.spec.accelerator
    if facts.on_cpu:
        share = f" / {split.tensor} ranks" if split.tensor > 1 else ""
        unit = "per replica" if split.tensor == 1 else "per rank"
        outside = []
        counted = [
            Term("KV cache", budget.available_kv_bytes, f"accelerator.kvCacheGiB {given.kv_cache_gib}{share}"),
            *(term._replace(name=f"+ {term.name}") for term in cpu_terms(facts.pair, split.tensor, budget)),
            Term("= memory needed", budget.requested_bytes, "all terms above"),
            Term("memory given", budget.total_bytes, f"accelerator.memoryGiB {given.memory_gib}{share}"),
        ]
    else:
        pair, unit, memory = on_product(facts.pair, chosen.product), "per GPU", "memory of the GPU"
        percent, is_known = facts.pair.limits.memory_utilization_percent, find_device(chosen.product) is not None
        by_user = given.memory_gib_per_gpu is not None and not is_known
        outside = outside_terms(pair, split, budget)
        counted = [
            Term(memory, budget.total_bytes, f"{MEMORY_FIELD} {given.memory_gib_per_gpu}")
            if by_user
            else Term(memory, budget.total_bytes, "as CUDA reports it", "sizing/data/devices.json"),
            Term(
                "budget",
                budget.requested_bytes,
                f"ceil({budget.total_bytes:,} x {percent} / 100)",
                "vLLM, v1/worker/utils.py, request_memory",
            ),
            *(term._replace(name=f"- {term.name}") for term in charged_terms(pair, split, budget)),
            Term("= left for KV cache", budget.available_kv_bytes, "budget minus all terms above"),
        ]
    judged = [*_verdict_terms(facts, chosen), *outside]
    return Explained(unit, counted, capacity_figures(facts.pair, split, budget), judged)


def _verdict_terms(facts: Facts, chosen: Candidate) -> list[Term]:
    budget, limits = chosen.budget, facts.pair.limits
    grouping = tightest_grouping(facts.pair, chosen.split, budget)
    blocks = request_blocks(grouping, limits.max_model_len)
    requests = f"{limits.min_concurrency} request{'s' * (limits.min_concurrency > 1)}{chosen.split.each_copy}"
    needed = f"({requests} x {blocks:,} + the null block) x {grouping.bytes_per_block:,}"
    sequences = limits.max_num_seqs * grouping.bytes_per_block
    if budget.needed_kv_bytes == sequences > (limits.min_concurrency * blocks + 1) * grouping.bytes_per_block:
        # With states, each of the max_num_seqs requests needs a block.
        needed = f"{limits.max_num_seqs:,} requests x {grouping.bytes_per_block:,}"
    spare, difference = budget.available_kv_bytes - budget.needed_kv_bytes, "left minus needed"
    if facts.on_cpu:
        spare, difference = budget.total_bytes - budget.requested_bytes, "memory given minus needed"
    kept = budget.estimated_margin_bytes
    of_estimates = f"; {kept:,} of it for estimated models" if kept else ""
    margin = f"minimum to spare for Fits, because estimates may be wrong{of_estimates}"
    return [
        Term("KV cache needed", budget.needed_kv_bytes, needed),
        Term("to spare", spare, difference),
        Term("margin", budget.margin_bytes, margin, f"sizing/data/memory.json; documentation: {ACCURACY_PAGE}"),
    ]


def explain_data(result: Answers) -> ExplainOutput:
    """Return the output for ``-o json`` and ``-o yaml``."""
    return ExplainOutput(objects=list(map(_object_data, result.answers)), errors=list(map(str, result.errors)))


def _object_data(answer: Answer) -> ExplainedOutput:
    document, label = answer.document, None
    counted, figures, judged = list[Term](), list[Figure](), list[Term]()
    if answer.facts and answer.candidates:
        label = answer.candidates[0].label
        _, counted, figures, judged = explained(answer.facts, answer.candidates[0])
    return ExplainedOutput(
        name=document.name,
        namespace=document.namespace,
        place=document.place,
        verdict=answer.verdict,
        explanation=answer.explanation,
        candidate=label,
        memory=list(map(_term, counted)),
        kv_cache=[FigureOutput(**figure._asdict()) for figure in figures],
        judged=list(map(_term, judged)),
        problems=problems_data(answer.problems),
    )


def _term(term: Term) -> TermOutput:
    return TermOutput(name=term.name, bytes=term.size_bytes, formula=term.formula, source=term.source or None)


def explain_text(answer: Answer, width: int | None = None) -> str:
    """Return the text for one object: budget, KV cache capacity, verdict and sources at the best candidate."""
    if answer.facts is None or not answer.candidates:
        return plan_text(answer, matrix=False, width=width)
    chosen = answer.candidates[0]
    unit, counted, figures, judged = explained(answer.facts, chosen)
    results = [(figure.name, figure.formula, f"= {figure.result}") for figure in figures]
    by_source: dict[str, list[str]] = {}
    for term in (*counted, *judged):
        if term.source:
            by_source.setdefault(term.source, []).append(term.name.lstrip("-+ "))
    sources = [(source, "; ".join(names)) for source, names in by_source.items()]
    return "\n".join(
        [
            *folded(heading(answer, answer.facts), width),
            "",
            f"Memory {unit} on {chosen.label}:",
            *_table(counted, width),
            "",
            "Capacity of the KV cache:",
            *aligned(results, left=2, width=width, foldable=(1,)),
            "",
            "Verdict:",
            *_table(judged, width),
            *folded(f"  {answer.verdict}: {answer.explanation}", width),
            "",
            "Sources:",
            *aligned(sources, left=2, width=width, foldable=(0, 1)),
        ]
    )


def _table(terms: list[Term], width: int | None) -> list[str]:
    rows = [(term.name, term.formula, f"{term.size_bytes:,}", gib(term.size_bytes)) for term in terms]
    return aligned([("term", "formula", "= bytes", "GiB"), *rows], left=2, width=width, foldable=(0, 1))
