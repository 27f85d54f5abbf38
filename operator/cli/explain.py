"""`specdecode explain`: each term of a memory budget with its formula and numbers."""

from dataclasses import dataclass
from typing import Annotated

import typer

from specdecode_operator.cli import options
from specdecode_operator.cli.input_files import read_deployments
from specdecode_operator.cli.options import ExitCode, TableOrData
from specdecode_operator.cli.outputs import Output, ProblemOutput, Verdict, print_data
from specdecode_operator.cli.plan.answers import INVALID, UNKNOWN, Answer, Answers, Candidate, ask, say_what_is_missing
from specdecode_operator.cli.plan.data import problem_data
from specdecode_operator.cli.plan.text import gib, heading, plan_text
from specdecode_operator.cli.terminal import aligned, folded, line_width, say
from specdecode_operator.deployment.spec_facts import Facts
from specdecode_operator.sizing.devices import MEMORY_FIELD, find_device
from specdecode_operator.sizing.memory.activation import on_product
from specdecode_operator.sizing.memory.budget import Budget, tightest_grouping
from specdecode_operator.sizing.memory.explain import (
    Figure,
    Term,
    capacity_figures,
    charged_terms,
    cpu_terms,
    outside_terms,
)
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


@dataclass(frozen=True)
class Explained:
    """One object, explained."""

    facts: Facts
    chosen: Candidate  # Where it would run
    unit: str  # What the terms are of: a GPU, a replica or a rank
    counted: list[Term]  # The budget and what is taken off it
    figures: list[Figure]  # What the KV cache holds
    judged: list[Term]  # What the verdict compares


def explained(answer: Answer) -> Explained | None:
    """Return how an object's memory is counted; None where it is invalid, or has no candidate."""
    facts = answer.facts
    if facts is None or not answer.candidates:
        return None
    chosen = answer.candidates[0]
    unit = "per GPU"
    if facts.on_cpu:
        unit = "per replica" if chosen.split.tensor == 1 else "per rank"
    return Explained(
        facts=facts,
        chosen=chosen,
        unit=unit,
        counted=_cpu_terms(facts, chosen) if facts.on_cpu else _gpu_terms(facts, chosen),
        figures=capacity_figures(facts.pair, chosen.split, chosen.budget),
        judged=_verdict_terms(facts, chosen),
    )


def _gpu_terms(facts: Facts, chosen: Candidate) -> list[Term]:
    budget, percent = chosen.budget, facts.pair.limits.memory_utilization_percent
    charged = charged_terms(on_product(facts.pair, chosen.product), chosen.split, budget)
    return [
        _memory_term(facts, chosen),
        Term(
            "budget",
            budget.requested_bytes,
            f"ceil({budget.total_bytes:,} x {percent} / 100)",
            "vLLM, v1/worker/utils.py, request_memory",
        ),
        *(term._replace(name=f"- {term.name}") for term in charged),
        Term("= left for KV cache", budget.available_kv_bytes, "the budget less all terms above"),
    ]


def _memory_term(facts: Facts, chosen: Candidate) -> Term:
    total_bytes = chosen.budget.total_bytes
    given = facts.spec.accelerator.memory_gib_per_gpu
    if given is not None and find_device(chosen.product) is None:
        return Term("memory of the GPU", total_bytes, f"{MEMORY_FIELD} {given}")
    return Term("memory of the GPU", total_bytes, "as CUDA reports it", "sizing/data/devices.json")


def _cpu_terms(facts: Facts, chosen: Candidate) -> list[Term]:
    budget, given, tensor = chosen.budget, facts.spec.accelerator, chosen.split.tensor
    share = f" / {tensor} ranks" if tensor > 1 else ""
    return [
        Term("KV cache", budget.available_kv_bytes, f"accelerator.kvCacheGiB {given.kv_cache_gib}{share}"),
        *(term._replace(name=f"+ {term.name}") for term in cpu_terms(facts.pair, tensor, budget)),
        Term("= memory needed", budget.requested_bytes, "all terms above"),
        Term("memory given", budget.total_bytes, f"accelerator.memoryGiB {given.memory_gib}{share}"),
    ]


def _for_estimated(budget: Budget) -> str:
    size_bytes = budget.estimated_margin_bytes
    return f"; {size_bytes:,} of it for estimated models" if size_bytes else ""


def _verdict_terms(facts: Facts, chosen: Candidate) -> list[Term]:
    budget, limits = chosen.budget, facts.pair.limits
    grouping = tightest_grouping(facts.pair, chosen.split, budget)
    blocks = request_blocks(grouping, limits.max_model_len)
    requests = f"{limits.min_concurrency} requests{chosen.split.each_copy}"
    needed = f"({requests} x {blocks:,} + the null block) x {grouping.bytes_per_block:,}"
    sequences = limits.max_num_seqs * grouping.bytes_per_block
    if budget.needed_kv_bytes == sequences > (limits.min_concurrency * blocks + 1) * grouping.bytes_per_block:
        # Of a model with states each request that may run needs a block.
        needed = f"{limits.max_num_seqs:,} requests x {grouping.bytes_per_block:,}"
    spare = budget.available_kv_bytes - budget.needed_kv_bytes
    if facts.on_cpu:
        spare = budget.total_bytes - budget.requested_bytes
    return [
        Term("KV cache needed", budget.needed_kv_bytes, needed),
        Term("to spare", spare, "memory given less needed" if facts.on_cpu else "left less needed"),
        Term(
            "margin",
            budget.margin_bytes,
            "to spare at least for Fits: how far the estimates may be off" + _for_estimated(budget),
            "sizing/data/memory.json; docs/explanation/accuracy.md",
        ),
        *([] if facts.on_cpu else outside_terms(on_product(facts.pair, chosen.product), chosen.split, budget)),
    ]


def explain_data(result: Answers) -> ExplainOutput:
    """Return how the memory of each object is counted."""
    return ExplainOutput(
        objects=[_object(answer) for answer in result.answers], errors=[str(error) for error in result.errors]
    )


def _object(answer: Answer) -> ExplainedOutput:
    told = explained(answer)
    return ExplainedOutput(
        name=answer.document.name,
        namespace=answer.document.namespace,
        place=answer.document.place,
        verdict=answer.verdict,
        explanation=answer.explanation,
        candidate=told and told.chosen.label,
        memory=[_term(term) for term in told.counted] if told else [],
        kv_cache=[FigureOutput(**figure._asdict()) for figure in told.figures] if told else [],
        judged=[_term(term) for term in told.judged] if told else [],
        problems=[problem_data(problem) for problem in answer.problems],
    )


def _term(term: Term) -> TermOutput:
    return TermOutput(name=term.name, bytes=term.size_bytes, formula=term.formula, source=term.source or None)


def explain_text(answer: Answer, width: int | None = None) -> str:
    """Return what `explain` prints for one object: the budget of the chosen candidate, and what its KV cache holds."""
    told = explained(answer)
    if told is None:
        return plan_text(answer, matrix=False, width=width)
    results = [(figure.name, figure.formula, f"= {figure.result}") for figure in told.figures]
    return "\n".join(
        [
            *folded(heading(answer, told.facts), width),
            "",
            f"Memory {told.unit} on {told.chosen.label}:",
            *_table(told.counted, width),
            "",
            "What the KV cache holds:",
            *aligned(results, left=2, width=width, foldable=(1,)),
            "",
            "Verdict:",
            *_table(told.judged, width),
            *folded(f"  {answer.verdict}: {answer.explanation}", width),
            "",
            "Sources:",
            *_sources([*told.counted, *told.judged], width),
        ]
    )


def _table(terms: list[Term], width: int | None) -> list[str]:
    rows = [(term.name, term.formula, f"{term.size_bytes:,}", gib(term.size_bytes)) for term in terms]
    return aligned([("term", "formula", "= bytes", "GiB"), *rows], left=2, width=width, foldable=(0, 1))


def _sources(terms: list[Term], width: int | None) -> list[str]:
    by_source: dict[str, list[str]] = {}
    for term in terms:
        if term.source:
            by_source.setdefault(term.source, []).append(term.name.lstrip("-+ "))
    return aligned(
        [(source, "; ".join(names)) for source, names in by_source.items()], left=2, width=width, foldable=(0, 1)
    )


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
    # Sizing and the API's models take longer to load than the rest of the command line.

    reading = read_deployments(options.sources(files, file))
    models = options.hub_models(wanted=hub)
    result = ask(reading, nodes, model_config or [], calibration, models=models, facts=facts or [])
    if output is TableOrData.TABLE:
        _print(result)
    else:
        print_data(explain_data(result), output)
    say_what_is_missing(result.errors, result.unknown, hub=hub)
    verdicts = {answer.verdict for answer in result.answers}
    if result.errors or INVALID in verdicts:
        raise typer.Exit(ExitCode.INVALID)
    if UNKNOWN in verdicts:
        raise typer.Exit(ExitCode.UNKNOWN)


def _print(result: "Answers") -> None:
    width = line_width()
    texts = (explain_text(each, width) for each in result.answers)
    say("\n\n".join(texts), nl=bool(result.answers), verdicts=True)
