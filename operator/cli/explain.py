"""`specdecode explain`: each term of a memory budget with its formula and numbers."""

from typing import Annotated, Final, NamedTuple

import typer

from specdecode_operator.cli import options
from specdecode_operator.cli.input_files import InputOptions, read_deployments
from specdecode_operator.cli.options import ExitCode, TableOrData
from specdecode_operator.cli.outputs import Output, ProblemOutput, Verdict, print_data, problems_data
from specdecode_operator.cli.plan.answers import INVALID, UNKNOWN, Answer, Answers, Candidate, ask, say_what_is_missing
from specdecode_operator.cli.plan.text import gib, heading, plan_text
from specdecode_operator.cli.terminal import aligned, folded, line_width, say
from specdecode_operator.deployment.spec_facts import Facts
from specdecode_operator.sizing.arithmetic import ceil_div, formula, traced
from specdecode_operator.sizing.devices import MEMORY_FIELD, find_device
from specdecode_operator.sizing.geometry import precision_name
from specdecode_operator.sizing.memory.activation import activation_bytes, on_product, verification_bytes
from specdecode_operator.sizing.memory.budget import (
    Budget,
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
from specdecode_operator.sizing.rank_layers import stages

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
"""Unit of a number, by the field of models and settings that holds it."""

_MEASURED: Final = "measured, sizing/data/memory.json"


class Term(NamedTuple):
    """One term of a budget: its name, bytes, formula and source."""

    name: str
    size_bytes: int
    formula: str
    source: str = ""


class Figure(NamedTuple):
    """One figure of the KV cache's capacity."""

    name: str
    formula: str
    result: str


def charged_terms(pair: Pair, split: Parallelism, budget: Budget) -> list[Term]:
    """Return the terms that are charged to a GPU's budget before the KV cache."""
    number = tightest_stage(pair, split, budget)
    pair, split = _traced(pair, split)
    stage = stages(pair.target, split.pipeline)[number]
    state, activation = charged_state_bytes(pair, split, stage), activation_bytes(pair, split, stage)
    terms = [
        *_weight_terms(pair, split, number),
        _sourced("state", state, "vLLM, v1/worker/gpu: sample, structured_outputs.py, states.py, spec_decode"),
        _sourced("activation", activation, "vLLM, profile_run and _dummy_run of its model runner"),
        _graphs(pair, graph_bytes(pair, split)),
        _sourced("non-torch", non_torch_bytes(pair, split), _MEASURED),
    ]
    if budget.calibration:
        terms.append(Term("correction", budget.correction_bytes, f"by {budget.calibration}", "the calibration file"))
    return terms


def cpu_terms(pair: Pair, tensor: int, budget: Budget) -> list[Term]:
    """Return the terms of a rank on CPU beside the KV cache."""
    weights = _weight_terms(*_traced(pair, Parallelism(tensor)), 0)
    engine = Term("engine", budget.non_torch_bytes, "Python, torch and vLLM's processes", _MEASURED)
    return [*(term for term in weights if not term.name.endswith(ALLOCATOR)), engine]


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
    of_block = f"pages of the layers that share it; {len(each_group)} groups of layers take blocks of their own"
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
    """Return copies with which the functions of sizing give formulas, too."""
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


def _graphs(pair: Pair, size_bytes: int) -> Term:
    term = _sourced("CUDA graphs", size_bytes, _MEASURED)
    if pair.limits.enforce_eager:
        return term._replace(formula="none: enforceEager is true")
    if not pair.limits.captures_graphs:
        return term._replace(formula="none: cudagraphMode is NONE")
    if not pair.era.charges_graphs:
        return term._replace(formula="not charged by this version: they are outside the budget")
    return term


class TermOutput(Output):
    """One term of a budget."""

    name: str
    """What it is; - before what is taken off the budget, = before what is left."""
    bytes: int
    """Its size."""
    formula: str
    """How it comes about, with the numbers filled in."""
    source: str | None
    """Where the rule is from; null where it is plain arithmetic."""


class FigureOutput(Output):
    """One figure of what the KV cache holds."""

    name: str
    """What it is."""
    formula: str
    """How it comes about."""
    result: str
    """The figure, as it is printed."""


class ExplainedOutput(Output):
    """How the memory of one object is counted, at the candidate that `plan` chooses."""

    name: str
    """Its name."""
    namespace: str | None
    """Its namespace; null where it says none."""
    place: str
    """File, and number of the document in it."""
    verdict: Verdict
    """Whether it fits."""
    explanation: str
    """Why, in one sentence."""
    candidate: str | None
    """Where, such as 2 x H200, TP 2; null where there is no candidate."""
    memory: list[TermOutput]
    """The budget and what is taken off it; empty without a candidate. So are the next two."""
    kv_cache: list[FigureOutput]
    """What the KV cache holds."""
    judged: list[TermOutput]
    """What the verdict compares."""
    problems: list[ProblemOutput]
    """What is invalid."""


class ExplainOutput(Output):
    """The answer of `explain`."""

    objects: list[ExplainedOutput]
    """One for each object, in the order of reading."""
    errors: list[str]
    """What could not be read."""


class Explained(NamedTuple):
    """One object, explained."""

    unit: str  # Of a GPU, a replica or a rank
    counted: list[Term]  # The budget and what is taken off it
    figures: list[Figure]  # What the KV cache holds
    judged: list[Term]  # What the verdict compares


def explained(facts: Facts, chosen: Candidate) -> Explained:
    """Return how the memory of the chosen candidate is counted."""
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
            Term("= left for KV cache", budget.available_kv_bytes, "the budget less all terms above"),
        ]
    judged = [*_verdict_terms(facts, chosen), *outside]
    return Explained(unit, counted, capacity_figures(facts.pair, split, budget), judged)


def _verdict_terms(facts: Facts, chosen: Candidate) -> list[Term]:
    budget, limits = chosen.budget, facts.pair.limits
    grouping = tightest_grouping(facts.pair, chosen.split, budget)
    blocks = request_blocks(grouping, limits.max_model_len)
    requests = f"{limits.min_concurrency} requests{chosen.split.each_copy}"
    needed = f"({requests} x {blocks:,} + the null block) x {grouping.bytes_per_block:,}"
    sequences = limits.max_num_seqs * grouping.bytes_per_block
    if budget.needed_kv_bytes == sequences > (limits.min_concurrency * blocks + 1) * grouping.bytes_per_block:
        # Each request that may run of a model with states needs a block.
        needed = f"{limits.max_num_seqs:,} requests x {grouping.bytes_per_block:,}"
    spare, difference = budget.available_kv_bytes - budget.needed_kv_bytes, "left less needed"
    if facts.on_cpu:
        spare, difference = budget.total_bytes - budget.requested_bytes, "memory given less needed"
    kept = budget.estimated_margin_bytes
    of_estimates = f"; {kept:,} of it for estimated models" if kept else ""
    margin = f"to spare at least for Fits: how far the estimates may be off{of_estimates}"
    return [
        Term("KV cache needed", budget.needed_kv_bytes, needed),
        Term("to spare", spare, difference),
        Term("margin", budget.margin_bytes, margin, "sizing/data/memory.json; docs/design/accuracy.md"),
    ]


def explain_data(result: Answers) -> ExplainOutput:
    """Return how the memory of each object is counted."""
    return ExplainOutput(objects=list(map(_object, result.answers)), errors=list(map(str, result.errors)))


def _object(answer: Answer) -> ExplainedOutput:
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
    """Return what `explain` prints for one object: the budget of the chosen candidate, and what its KV cache holds."""
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
            "What the KV cache holds:",
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


def explain_command(  # noqa: PLR0913  each is an option
    files: options.FilesArgument = None,
    *,
    file: options.FilesOption = None,
    nodes: options.NodesOption = None,
    model_config: options.ModelConfigOption = None,
    facts: options.FactsOption = None,
    hub: options.HubOption = False,
    calibration: options.CalibrationOption = None,
    output: Annotated[
        TableOrData, typer.Option("--output", "-o", help="Format: table, json or yaml.")
    ] = TableOrData.TABLE,
) -> None:
    """Show how the memory of the chosen candidate is computed, term by term, with the sums of `plan`.

    Exits with 0, 2 for invalid input, or 5 when a model is unknown.
    """
    reading, models = read_deployments(options.sources(files, file)), options.hub_models(wanted=hub)
    result = ask(reading, InputOptions(nodes, model_config or [], calibration, facts or [], models))
    if output is TableOrData.TABLE:
        texts = (explain_text(each, line_width()) for each in result.answers)
        say("\n\n".join(texts), nl=bool(result.answers), verdicts=True)
    else:
        print_data(explain_data(result), output)
    say_what_is_missing(result.errors, result.unknown, hub=hub)
    verdicts = {answer.verdict for answer in result.answers}
    if result.errors or INVALID in verdicts:
        raise typer.Exit(ExitCode.INVALID)
    if UNKNOWN in verdicts:
        raise typer.Exit(ExitCode.UNKNOWN)
