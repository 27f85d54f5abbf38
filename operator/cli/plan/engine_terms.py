"""What the engine takes beside weights and KV cache: graphs, libraries, and what lies outside the budget."""

from typing import Final

from specdecode_operator.cli.plan.terms import TermLine, exact
from specdecode_operator.sizing.base.devices import memory_coefficients
from specdecode_operator.sizing.base.eras import Runner, Sampler
from specdecode_operator.sizing.base.units import GIB, ceil_div
from specdecode_operator.sizing.memory.budget import Budget
from specdecode_operator.sizing.memory.overhead import (
    capture_sizes,
    graph_bytes,
    graph_layers,
    graph_pool_bytes,
    non_torch_bytes,
    quantization_steps,
    shares_no_layer,
)
from specdecode_operator.sizing.pair.pair import METHODS_WITH_HIDDEN_STATES, Pair, Parallelism

_FLOAT32_BYTES: Final = 4


def graph_terms(pair: Pair, split: Parallelism) -> TermLine:
    """Return what is charged for CUDA graphs, target's and drafter's parts apart."""
    charged = graph_bytes(pair, split)
    if pair.limits.enforce_eager:
        return TermLine("CUDA graphs", "none: enforceEager is true", charged)
    if not pair.limits.captures_graphs:
        return TermLine("CUDA graphs", "none: cudagraphMode is NONE", charged)
    if not pair.era.charges_graphs:
        return TermLine("CUDA graphs", "not charged by this version: they are outside the budget", charged)
    sizes, captured = memory_coefficients().graphs, capture_sizes(pair)
    if pair.era.runner is Runner.V2:
        drafter = sizes.v2_draft_head if pair.method in METHODS_WITH_HIDDEN_STATES else 0
        formula = f"{sizes.v2:,} + ({captured} sizes - 1) x {sizes.v2_size:,}"
        formula += f" + {drafter:,} of the drafter" if pair.num_speculative_tokens else ""
        value = sizes.v2 + (captured - 1) * sizes.v2_size + drafter
        return TermLine("CUDA graphs", exact(formula, value, charged, "estimate (sizing/data)"), charged)
    per_layer = sizes.v1_layer + (sizes.v1_expert_layer if pair.target.has_experts else 0)
    formula = _v1_graphs(pair, split, per_layer, sizes.v1_quantization_step)
    return TermLine("CUDA graphs", formula, charged)


def _v1_graphs(pair: Pair, split: Parallelism, per_layer: int, per_step: int) -> str:
    """A draft's layers count half: they are captured in pieces only."""
    (target, draft), steps = graph_layers(pair, split), quantization_steps(pair)
    layers = f"({target} layers of the target + {draft} of the drafter)" if draft else f"{target} layers"
    quantizing = f" + {steps} x {per_step:,}" if steps else ""
    most = memory_coefficients().graphs.v1_sizes
    return f"floor(({layers} x {per_layer:,}{quantizing}) x ({capture_sizes(pair)} sizes - 1) / ({most} - 1))"


def non_torch_term(pair: Pair, split: Parallelism) -> TermLine:
    """Return NCCL, workspaces and modules: what was measured, and what grows with the layers."""
    counted, sizes = non_torch_bytes(pair, split), memory_coefficients().non_torch
    if pair.era.runner is Runner.V2 or split.tensor == 1:
        known = {sizes.v2_one_gpu, sizes.v2_several_gpus, sizes.one_gpu, sizes.pipeline_only}
        where = "on one GPU of a stage" if shares_no_layer(pair, split) else "on several GPUs, NCCL among them"
        rest = "" if counted in known else ", and stacks of the top-k kernel"
        words = f"{counted / GIB:.2f} GiB, {pair.era.runner.value} {where}{rest}: estimate (sizing/data)"
        return TermLine("non-torch", words, counted)
    base, each = _measured_non_torch(split.tensor)
    layers = ceil_div(pair.target.num_layers, split.pipeline)
    formula = f"{base:,} + {layers} layers x {each:,}"
    stacks = counted - base - layers * each
    if pair.era.sampler is Sampler.TRITON and stacks:
        formula += f" + {stacks:,} of stacks of the top-k kernel"
    return TermLine("non-torch", formula, counted)


def _measured_non_torch(tensor: int) -> tuple[int, int]:
    sizes = memory_coefficients().non_torch
    if tensor == 2:  # noqa: PLR2004 (measured for two apart)
        return sizes.two_gpus, sizes.two_gpus_per_layer
    if tensor < 8:  # noqa: PLR2004 (estimated apart)
        return sizes.more_gpus, sizes.more_gpus_per_layer
    return sizes.eight_gpus, sizes.eight_gpus_per_layer


def outside_terms(pair: Pair, split: Parallelism, budget: Budget) -> list[TermLine]:
    """Return what lies outside the budget: what is free there, what graphs really take, and what verification may."""
    coefficients = memory_coefficients()
    reserved = coefficients.context_bytes + coefficients.slack_reserve_bytes
    uncharged = budget.total_bytes - budget.requested_bytes - reserved - budget.slack_bytes
    formula = (
        f"{budget.total_bytes:,} - {budget.requested_bytes:,} - {coefficients.context_bytes:,} of CUDA's context"
        f" - {coefficients.slack_reserve_bytes:,} for tables"
    )
    formula += f" - {uncharged:,} that is not charged" if uncharged else ""
    terms = [TermLine("slack: free outside the budget", formula, budget.slack_bytes)]
    if pair.num_speculative_tokens:
        terms.append(TermLine("overrun: verification", _verification(pair, split.tensor, budget), budget.overrun_bytes))
    return [*terms, *_pool_terms(pair, split)]


def _pool_terms(pair: Pair, split: Parallelism) -> list[TermLine]:
    pool = graph_pool_bytes(pair, split)
    if not pool:
        return []
    sizes = memory_coefficients().graphs
    if pair.era.runner is Runner.V2:
        return [TermLine("CUDA graphs' pool", "what graphs really take: estimate (sizing/data)", pool)]
    per_layer = sizes.v1_pool_layer + (sizes.v1_pool_expert_layer if pair.target.has_experts else 0)
    formula = f"{sizes.v1_pool:,} + {_v1_graphs(pair, split, per_layer, sizes.v1_pool_quantization_step)}"
    return [TermLine("CUDA graphs' pool", formula, pool)]


def _verification(pair: Pair, tensor: int, budget: Budget) -> str:
    """Logits of all rows that are verified at once, with their copies (sizing/memory/sampling.py)."""
    limits, vocabulary, width = pair.limits, pair.target.vocab_size, pair.target.dtype_bytes
    rows = min(limits.max_num_seqs * (pair.num_speculative_tokens + 1), limits.max_num_batched_tokens)
    words = f"verifying {rows:,} rows, beyond what the profiling run verified"
    if pair.era.runner is Runner.V1:
        return f"{words}, with the probabilities of the draft" if pair.samples_drafts else words
    logits = rows * vocabulary * width
    copies = f"(2 + 1 / {tensor})" if tensor > 1 else "2"
    value = logits + ceil_div(logits, tensor) + (logits if tensor > 1 else 0)
    piece = rows * vocabulary * _FLOAT32_BYTES
    formula = f"{rows:,} rows x {vocabulary:,} x {width} bytes x {copies} + "
    formula += f"{GIB:,} of a piece in float32" if piece > GIB else f"{rows:,} x {vocabulary:,} x 4"
    return exact(formula, value + min(piece, GIB), budget.overrun_bytes, words)
