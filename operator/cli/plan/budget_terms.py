"""The terms of a budget, each with its formula and the numbers filled in."""

from typing import Final

from specdecode_operator.cli.plan.answers import Candidate
from specdecode_operator.cli.plan.engine_terms import graph_terms, non_torch_term
from specdecode_operator.cli.plan.step_terms import step_formula
from specdecode_operator.cli.plan.terms import CapacityLine, TermLine, exact
from specdecode_operator.cli.plan.weight_terms import draft_terms, target_terms
from specdecode_operator.deployment.spec.facts import Facts
from specdecode_operator.sizing.base.units import ceil_div
from specdecode_operator.sizing.kv.capacity import request_blocks
from specdecode_operator.sizing.kv.layers import CacheKind
from specdecode_operator.sizing.kv.model_cache import cached_layers
from specdecode_operator.sizing.memory.budget import Budget, tightest_grouping
from specdecode_operator.sizing.memory.buffers import draft_logits_bytes
from specdecode_operator.sizing.memory.forward import forward_bytes
from specdecode_operator.sizing.memory.sampling import profiled_sampling_bytes
from specdecode_operator.sizing.model.geometry import ModelGeometry
from specdecode_operator.sizing.model.layers import SelfAttention
from specdecode_operator.sizing.pair.pair import METHODS_WITH_HIDDEN_STATES, Pair, Parallelism, loaded_draft
from specdecode_operator.sizing.weights.stages import whole_model

_KEYS_AND_VALUES: Final = 2
_INT32_BYTES: Final = 4
_BITS_PER_MASK_WORD: Final = 32


def charged_terms(facts: Facts, candidate: Candidate) -> list[TermLine]:
    """Return what is taken off the budget before the KV cache; on CPU: what is needed beside the KV cache."""
    pair, budget = facts.pair, candidate.budget
    terms = target_terms(pair, candidate.split, budget.target_weights_bytes)
    terms += draft_terms(pair, candidate.split, budget.draft_weights_bytes)
    if facts.on_cpu:
        words = "Python, torch and vLLM's processes: measured (sizing/data/memory.json)"
        return [*terms, TermLine("engine", words, budget.non_torch_bytes)]
    return [
        *terms,
        TermLine("state", _state(pair, budget), budget.state_bytes),
        TermLine("activation", _activation(pair, candidate), budget.activation_bytes),
        graph_terms(pair, candidate.split),
        non_torch_term(pair, candidate.split),
        *([TermLine("correction", f"by {budget.calibration}", budget.correction_bytes)] if budget.calibration else []),
    ]


def capacity_lines(facts: Facts, budget: Budget, split: Parallelism) -> list[CapacityLine]:
    """Return what the KV cache holds, step by step."""
    limits = facts.pair.limits
    length, available = limits.max_model_len, max(0, budget.available_kv_bytes)
    grouping = tightest_grouping(facts.pair, split, budget)
    block_bytes, blocks, per_request = grouping.bytes_per_block, budget.num_blocks, request_blocks(grouping, length)
    each_group = [group.blocks_per_request(length) for group in grouping.groups]
    in_groups = f"({' + '.join(f'{each:,}' for each in each_group)})" if len(each_group) > 1 else f"{per_request:,}"
    return [
        CapacityLine(
            "bytes of a token", _kv_bytes_per_token(facts.pair, budget, split), f"{budget.kv_bytes_per_token:,}"
        ),
        CapacityLine(
            "bytes of a block",
            exact(
                f"{limits.block_size} tokens x {budget.kv_bytes_per_token:,}",
                limits.block_size * budget.kv_bytes_per_token,
                block_bytes,
                f"pages of the layers that share it; {len(each_group)} groups of layers take blocks of their own",
            ),
            f"{block_bytes:,}",
        ),
        CapacityLine("blocks", f"floor({available:,} / {block_bytes:,})", f"{blocks:,}"),
        CapacityLine("blocks of a request", _request_blocks(facts.pair, in_groups, per_request), f"{per_request:,}"),
        CapacityLine("full requests", f"{blocks:,} / {per_request:,}", f"{budget.max_concurrency:,.2f}"),
        CapacityLine("tokens", f"floor({blocks:,} / {per_request:,} x {length:,})", f"{budget.kv_cache_tokens:,}"),
    ]


def _request_blocks(pair: Pair, in_groups: str, counted: int) -> str:
    """Blocks of a request of full length: each group of layers takes its own, those of a window fewer."""
    length, block = pair.limits.max_model_len, pair.limits.block_size
    return exact(f"ceil({length:,} / {block})", ceil_div(length, block), counted, f"{in_groups} for {length:,} tokens")


def _state(pair: Pair, budget: Budget) -> str:
    """The sampler's buffers for each request, and beside them the states that a draft and images are read from."""
    limits, vocabulary, tokens = pair.limits, pair.target.vocab_size, pair.num_speculative_tokens
    requests, words = limits.max_num_seqs, ceil_div(pair.target.vocab_size, _BITS_PER_MASK_WORD)
    buffers = []
    draft = loaded_draft(pair)
    if draft is not None and pair.method in METHODS_WITH_HIDDEN_STATES:
        buffers.append((draft[0], "hidden states for the draft"))
    if pair.target.tower.split_elements:
        buffers.append((pair.target, "embeddings of images"))
    kept = sum(_states_bytes(model, limits.max_num_batched_tokens) for model, _ in buffers) + draft_logits_bytes(pair)
    each = vocabulary * _INT32_BYTES + (tokens + 2) * words * _INT32_BYTES
    rest = (budget.state_bytes - kept) // requests - each
    if rest < 0:
        return exact("none", 0, budget.state_bytes, f"buffers of sampler and drafter for {requests:,} requests")
    formula = f"{requests:,} requests x ({vocabulary:,} x 4 + {tokens + 2} masks x {words:,} x 4 + {rest:,} of tables)"
    for model, what in buffers:
        formula += f" + {_states(model, limits.max_num_batched_tokens)} of {what}"
    if pair.samples_drafts and draft is not None:
        width = pair.target.dtype_bytes
        formula += f" + {requests:,} x {tokens} x {draft[0].vocab_size:,} x {width} of draft logits"
    return exact(
        formula,
        requests * (each + rest) + kept,
        budget.state_bytes,
        f"buffers of sampler and drafter for {requests:,} requests",
    )


def _activation(pair: Pair, candidate: Candidate) -> str:
    """The largest of the passes of the profiling run, and what the run keeps beside it."""
    limits, split = pair.limits, candidate.split
    tokens = limits.max_num_batched_tokens
    states = _states_bytes(pair.target, tokens)
    held = f"hidden states {_states(pair.target, tokens)}"
    step = forward_bytes(pair, pair.target, whole_model(pair.target), pair.target_precision, split)
    sampling = profiled_sampling_bytes(pair, candidate.tensor)
    peaks = [
        (step, "target's step", step_formula(pair, pair.target, pair.target_precision, split, step)),
        (sampling, "sampling", f"{held} + {sampling - states:,} of logits"),
    ]
    draft = loaded_draft(pair)
    if draft is not None:
        geometry, precision = draft
        of_draft = forward_bytes(pair, geometry, whole_model(geometry), precision, split)
        product = step_formula(pair, geometry, precision, split, of_draft)
        peaks.append((states + of_draft, "draft's step", f"{held} + {product}"))
    size, name, formula = max(peaks)
    kept = candidate.budget.activation_bytes - size
    if kept < 0:
        return f"peak of a step of {tokens:,} tokens beyond what stays"
    return f"{name}: {formula}" + (f" + {kept:,} held beside it" if kept else "")


def _states_bytes(model: ModelGeometry, tokens: int) -> int:
    return tokens * model.hidden_size * model.dtype_bytes


def _states(model: ModelGeometry, tokens: int) -> str:
    return f"{tokens:,} x {model.hidden_size:,} x {model.dtype_bytes}"


def _kv_bytes_per_token(pair: Pair, budget: Budget, split: Parallelism) -> str:
    """Heads and widths where all layers are alike; else what the layers of each kind take."""
    draft = loaded_draft(pair)
    models = [pair.target, *([draft[0]] if draft else [])]
    parts, total = [], 0
    for geometry in models:
        width = pair.limits.kv_cache_element_bytes or geometry.cache_element_bytes or geometry.dtype_bytes
        element = _element(pair, width)
        for attention in geometry.attentions:
            if isinstance(attention, SelfAttention):
                heads = max(1, attention.num_kv_heads // split.tensor)
                total += geometry.num_layers * _KEYS_AND_VALUES * heads * attention.head_dim * width
                parts.append(f"{geometry.num_layers} layers x 2 x {heads} heads x {attention.head_dim} x {element}")
    element_bytes = pair.limits.kv_cache_element_bytes
    by_stage = cached_layers(pair.target, draft[0] if draft else None, split.tensor, split.pipeline, element_bytes)
    growing = [[run for run in stage if run.layer.kind is not CacheKind.STATE] for stage in by_stage]
    counted = max(growing, key=lambda runs: sum(run.count * run.layer.token_bytes for run in runs))
    words = " + ".join(
        f"{run.count} {run.layer.kind.value} layers x {run.layer.token_bytes:,} bytes" for run in counted
    )
    return exact(" + ".join(parts), total, budget.kv_bytes_per_token, words)


def _element(pair: Pair, width: int) -> str:
    """What a number in the KV cache is, and who says so where it is not the model's type."""
    if width != 1:
        return f"{width} bytes"
    asked = "serving.kvCacheDtype" if pair.limits.kv_cache_element_bytes else "the checkpoint"
    return f"1 byte (fp8 from {asked})"
