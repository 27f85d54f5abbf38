"""Lays out how a budget is counted, for `explain`."""

from specdecode_operator.cli.plan.answers import Answer, Candidate
from specdecode_operator.cli.plan.tables import aligned
from specdecode_operator.cli.plan.text import gib, heading, plan_text
from specdecode_operator.cli.terminal import folded
from specdecode_operator.deployment.spec.facts import Facts
from specdecode_operator.sizing.kv.capacity import request_blocks
from specdecode_operator.sizing.memory.budget import tightest_grouping
from specdecode_operator.sizing.memory.explain import (
    Term,
    capacity_figures,
    charged_terms,
    cpu_terms,
    outside_terms,
)


def explain_text(answer: Answer, width: int | None = None) -> str:
    """Return what `explain` prints for one object: the budget of the chosen candidate, and what its KV cache holds."""
    facts = answer.facts
    if facts is None or not answer.candidates:
        return plan_text(answer, matrix=False, width=width)
    chosen = answer.candidates[0]
    unit = "per GPU"
    if facts.on_cpu:
        unit = "per replica" if chosen.split.tensor == 1 else "per rank"
    counted = _cpu_terms(facts, chosen) if facts.on_cpu else _gpu_terms(facts, chosen)
    verdict = _verdict_terms(facts, chosen)
    figures = capacity_figures(facts.pair, chosen.split, chosen.budget)
    results = [(figure.name, figure.formula, f"= {figure.result}") for figure in figures]
    return "\n".join(
        [
            *folded(heading(answer, facts), width),
            "",
            f"Memory {unit} on {chosen.label}:",
            *_table(counted, width),
            "",
            "What the KV cache holds:",
            *aligned(results, left=2, width=width, foldable=(1,)),
            "",
            "Verdict:",
            *_table(verdict, width),
            *folded(f"  {answer.verdict}: {answer.explanation}", width),
            "",
            "Sources:",
            *_sources([*counted, *verdict], width),
        ]
    )


def _gpu_terms(facts: Facts, chosen: Candidate) -> list[Term]:
    budget, percent = chosen.budget, facts.pair.limits.memory_utilization_percent
    charged = charged_terms(facts.pair, chosen.split, budget)
    return [
        Term("memory of the GPU", budget.total_bytes, "as CUDA reports it", "sizing/data/devices.json"),
        Term(
            "budget",
            budget.requested_bytes,
            f"ceil({budget.total_bytes:,} x {percent} / 100)",
            "vLLM, v1/worker/utils.py, request_memory",
        ),
        *(term._replace(name=f"- {term.name}") for term in charged),
        Term("= left for KV cache", budget.available_kv_bytes, "the budget less all terms above"),
    ]


def _cpu_terms(facts: Facts, chosen: Candidate) -> list[Term]:
    budget, given, tensor = chosen.budget, facts.spec.accelerator, chosen.split.tensor
    share = f" / {tensor} ranks" if tensor > 1 else ""
    return [
        Term("KV cache", budget.available_kv_bytes, f"accelerator.kvCacheGiB {given.kv_cache_gib}{share}"),
        *(term._replace(name=f"+ {term.name}") for term in cpu_terms(facts.pair, tensor, budget)),
        Term("= memory needed", budget.requested_bytes, "all terms above"),
        Term("memory given", budget.total_bytes, f"accelerator.memoryGiB {given.memory_gib}{share}"),
    ]


def _verdict_terms(facts: Facts, chosen: Candidate) -> list[Term]:
    budget, limits = chosen.budget, facts.pair.limits
    grouping = tightest_grouping(facts.pair, chosen.split, budget)
    blocks = request_blocks(grouping, limits.max_model_len)
    needed = f"({limits.min_concurrency} requests x {blocks:,} + the null block) x {grouping.bytes_per_block:,}"
    spare = budget.available_kv_bytes - budget.needed_kv_bytes
    if facts.on_cpu:
        spare = budget.total_bytes - budget.requested_bytes
    return [
        Term("KV cache needed", budget.needed_kv_bytes, needed),
        Term("to spare", spare, "memory given less needed" if facts.on_cpu else "left less needed"),
        Term(
            "margin",
            budget.margin_bytes,
            "to spare at least for Fits: how far the estimates may be off",
            "sizing/data/memory.json; docs/explanation/accuracy.md",
        ),
        *([] if facts.on_cpu else outside_terms(facts.pair, chosen.split, budget)),
    ]


def _table(terms: list[Term], width: int | None) -> list[str]:
    rows = [(term.name, term.formula, f"{term.size_bytes:,}", gib(term.size_bytes)) for term in terms]
    return aligned([("term", "formula", "= bytes", "GiB"), *rows], left=2, width=width, foldable=(0, 1))


def _sources(terms: list[Term], width: int | None) -> list[str]:
    """Return one line a source: where it is, and the terms that follow from it."""
    by_source: dict[str, list[str]] = {}
    for term in terms:
        if term.source:
            by_source.setdefault(term.source, []).append(term.name.lstrip("-+ "))
    return aligned(
        [(source, "; ".join(names)) for source, names in by_source.items()], left=2, width=width, foldable=(0, 1)
    )
