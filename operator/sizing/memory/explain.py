"""Terms of a budget with their formulas and sources, as `specdecode explain` prints them."""

from typing import Final, NamedTuple

from specdecode_operator.sizing.arithmetic import ceil_div, formula, traced
from specdecode_operator.sizing.geometry import precision_name
from specdecode_operator.sizing.memory.activation import activation_bytes, verification_bytes
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
        _term("state", state, "vLLM, v1/worker/gpu: sample, structured_outputs.py, states.py, spec_decode"),
        _term("activation", activation, "vLLM, profile_run and _dummy_run of its model runner"),
        _graphs(pair, graph_bytes(pair, split)),
        _term("non-torch", non_torch_bytes(pair, split), _MEASURED),
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
    terms = [_term("slack: free outside the budget", slack, _MEASURED)]
    if pair.num_speculative_tokens:
        verified = verification_bytes(pair, split.tensor)
        terms.append(_term("overrun: verification", verified, "vLLM, its rejection samplers"))
    return [*terms, *([_term("CUDA graphs' pool", pool, _MEASURED)] if pool else [])]


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


def _term(name: str, size_bytes: int, source: str) -> Term:
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
            terms += [_term(f"{role}: {words}", size, "vLLM's model classes; config.json")] if size else []
    return terms


def _graphs(pair: Pair, size_bytes: int) -> Term:
    term = _term("CUDA graphs", size_bytes, _MEASURED)
    if pair.limits.enforce_eager:
        return term._replace(formula="none: enforceEager is true")
    if not pair.limits.captures_graphs:
        return term._replace(formula="none: cudagraphMode is NONE")
    if not pair.era.charges_graphs:
        return term._replace(formula="not charged by this version: they are outside the budget")
    return term
