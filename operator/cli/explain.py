"""`specdecode explain`: each term of a memory budget with its formula and numbers."""

from typing import Annotated, NamedTuple

import typer

from specdecode_operator.cli import options
from specdecode_operator.cli.input_files import InputOptions, read_deployments
from specdecode_operator.cli.options import ExitCode, TableOrData
from specdecode_operator.cli.outputs import Output, ProblemOutput, Verdict, print_data, problems_data
from specdecode_operator.cli.plan.answers import INVALID, UNKNOWN, Answer, Answers, Candidate, ask, say_what_is_missing
from specdecode_operator.cli.plan.text import gib, heading, plan_text
from specdecode_operator.cli.terminal import aligned, folded, line_width, say
from specdecode_operator.deployment.spec_facts import Facts
from specdecode_operator.sizing.devices import MEMORY_FIELD, find_device
from specdecode_operator.sizing.memory import explain
from specdecode_operator.sizing.memory.activation import on_product
from specdecode_operator.sizing.memory.budget import tightest_grouping
from specdecode_operator.sizing.memory.kv_cache import request_blocks


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
    counted: list[explain.Term]  # The budget and what is taken off it
    figures: list[explain.Figure]  # What the KV cache holds
    judged: list[explain.Term]  # What the verdict compares


def explained(facts: Facts, chosen: Candidate) -> Explained:
    """Return how the memory of the chosen candidate is counted."""
    budget, split, given = chosen.budget, chosen.split, facts.spec.accelerator
    if facts.on_cpu:
        share = f" / {split.tensor} ranks" if split.tensor > 1 else ""
        unit = "per replica" if split.tensor == 1 else "per rank"
        outside = []
        counted = [
            explain.Term("KV cache", budget.available_kv_bytes, f"accelerator.kvCacheGiB {given.kv_cache_gib}{share}"),
            *(term._replace(name=f"+ {term.name}") for term in explain.cpu_terms(facts.pair, split.tensor, budget)),
            explain.Term("= memory needed", budget.requested_bytes, "all terms above"),
            explain.Term("memory given", budget.total_bytes, f"accelerator.memoryGiB {given.memory_gib}{share}"),
        ]
    else:
        pair, unit, memory = on_product(facts.pair, chosen.product), "per GPU", "memory of the GPU"
        percent, is_known = facts.pair.limits.memory_utilization_percent, find_device(chosen.product) is not None
        by_user = given.memory_gib_per_gpu is not None and not is_known
        outside = explain.outside_terms(pair, split, budget)
        counted = [
            explain.Term(memory, budget.total_bytes, f"{MEMORY_FIELD} {given.memory_gib_per_gpu}")
            if by_user
            else explain.Term(memory, budget.total_bytes, "as CUDA reports it", "sizing/data/devices.json"),
            explain.Term(
                "budget",
                budget.requested_bytes,
                f"ceil({budget.total_bytes:,} x {percent} / 100)",
                "vLLM, v1/worker/utils.py, request_memory",
            ),
            *(term._replace(name=f"- {term.name}") for term in explain.charged_terms(pair, split, budget)),
            explain.Term("= left for KV cache", budget.available_kv_bytes, "the budget less all terms above"),
        ]
    judged = [*_verdict_terms(facts, chosen), *outside]
    return Explained(unit, counted, explain.capacity_figures(facts.pair, split, budget), judged)


def _verdict_terms(facts: Facts, chosen: Candidate) -> list[explain.Term]:
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
        explain.Term("KV cache needed", budget.needed_kv_bytes, needed),
        explain.Term("to spare", spare, difference),
        explain.Term("margin", budget.margin_bytes, margin, "sizing/data/memory.json; docs/explanation/accuracy.md"),
    ]


def explain_data(result: Answers) -> ExplainOutput:
    """Return how the memory of each object is counted."""
    return ExplainOutput(objects=list(map(_object, result.answers)), errors=list(map(str, result.errors)))


def _object(answer: Answer) -> ExplainedOutput:
    document, label = answer.document, None
    counted, figures, judged = list[explain.Term](), list[explain.Figure](), list[explain.Term]()
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


def _term(term: explain.Term) -> TermOutput:
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


def _table(terms: list[explain.Term], width: int | None) -> list[str]:
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
    output: Annotated[TableOrData, typer.Option("--output", "-o", help="table, json or yaml.")] = TableOrData.TABLE,
) -> None:
    """Show how the memory of the chosen candidate is counted, term by term; the sums are those of `plan`.

    Exits with 0, 2 for invalid input, or 5 when a model is unknown here.
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
