"""How the memory of an object's chosen candidate is counted, term by term: what `explain` prints."""

from dataclasses import dataclass

from specdecode_operator.cli.plan.answers import Answer, Candidate
from specdecode_operator.deployment.spec.facts import Facts
from specdecode_operator.sizing.base.devices import MEMORY_FIELD, find_device
from specdecode_operator.sizing.kv.capacity import request_blocks
from specdecode_operator.sizing.memory.budget import Budget, tightest_grouping
from specdecode_operator.sizing.memory.explain import (
    Figure,
    Term,
    capacity_figures,
    charged_terms,
    cpu_terms,
    outside_terms,
)
from specdecode_operator.sizing.memory.latent import on_product


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
