"""Lays out how a budget is counted, for `explain`."""

from specdecode_operator.cli.plan.answers import Answer, Candidate
from specdecode_operator.cli.plan.budget_terms import capacity_lines, charged_terms
from specdecode_operator.cli.plan.engine_terms import outside_terms
from specdecode_operator.cli.plan.tables import aligned
from specdecode_operator.cli.plan.terms import CapacityLine, TermLine
from specdecode_operator.cli.plan.text import gib, heading, plan_text
from specdecode_operator.deployment.spec.facts import Facts
from specdecode_operator.sizing.kv.capacity import request_blocks
from specdecode_operator.sizing.memory.budget import tightest_grouping


def explain_text(answer: Answer) -> str:
    """Return what `explain` prints for one object: the budget of the chosen candidate, and what its KV cache holds."""
    facts = answer.facts
    if facts is None or not answer.candidates:
        return plan_text(answer, matrix=False)
    chosen = answer.candidates[0]
    budget = chosen.budget
    capacity = capacity_lines(facts, budget, chosen.split)
    unit = "per GPU"
    if facts.on_cpu:
        unit = "per replica" if chosen.split.tensor == 1 else "per rank"
    return "\n".join(
        [
            heading(answer, facts),
            "",
            f"Memory {unit} on {chosen.label}:",
            *_table(_cpu_lines(facts, chosen) if facts.on_cpu else _gpu_lines(facts, chosen)),
            "",
            "What the KV cache holds:",
            *_capacity_table(capacity),
            "",
            "Verdict:",
            *_table(_verdict_lines(facts, chosen)),
            f"  {answer.verdict}: {answer.explanation}",
        ]
    )


def _gpu_lines(facts: Facts, chosen: Candidate) -> list[TermLine]:
    budget, percent = chosen.budget, facts.pair.limits.memory_utilization_percent
    return [
        TermLine("memory of the GPU", "as CUDA reports it (sizing/data/devices.json)", budget.total_bytes),
        TermLine("budget", f"ceil({budget.total_bytes:,} x {percent} / 100)", budget.requested_bytes),
        *(TermLine(f"- {term.name}", term.formula, term.size_bytes) for term in charged_terms(facts, chosen)),
        TermLine("= left for KV cache", "the budget less all terms above", budget.available_kv_bytes),
    ]


def _cpu_lines(facts: Facts, chosen: Candidate) -> list[TermLine]:
    budget, given, tensor = chosen.budget, facts.spec.accelerator, chosen.split.tensor
    share = f" / {tensor} ranks" if tensor > 1 else ""
    return [
        TermLine("KV cache", f"accelerator.kvCacheGiB {given.kv_cache_gib}{share}", budget.available_kv_bytes),
        *(TermLine(f"+ {term.name}", term.formula, term.size_bytes) for term in charged_terms(facts, chosen)),
        TermLine("= memory needed", "all terms above", budget.requested_bytes),
        TermLine("memory given", f"accelerator.memoryGiB {given.memory_gib}{share}", budget.total_bytes),
    ]


def _verdict_lines(facts: Facts, chosen: Candidate) -> list[TermLine]:
    budget, limits = chosen.budget, facts.pair.limits
    grouping = tightest_grouping(facts.pair, chosen.split, budget)
    spare = budget.available_kv_bytes - budget.needed_kv_bytes
    if facts.on_cpu:
        spare = budget.total_bytes - budget.requested_bytes
    return [
        TermLine(
            "KV cache needed",
            f"({limits.min_concurrency} requests x {request_blocks(grouping, limits.max_model_len):,} + the null block)"
            f" x {grouping.bytes_per_block:,}",
            budget.needed_kv_bytes,
        ),
        TermLine("to spare", "memory given less needed" if facts.on_cpu else "left less needed", spare),
        TermLine("margin", "to spare at least for Fits: how far the estimates may be off", budget.margin_bytes),
        *([] if facts.on_cpu else outside_terms(facts.pair, chosen.split, budget)),
    ]


def _table(lines: list[TermLine]) -> list[str]:
    rows = [(line.name, line.formula, f"{line.size_bytes:,}", gib(line.size_bytes)) for line in lines]
    return aligned([("term", "formula", "= bytes", "GiB"), *rows], left=2)


def _capacity_table(lines: list[CapacityLine]) -> list[str]:
    return aligned([(line.name, line.formula, f"= {line.result}") for line in lines], left=2)
