"""What the engine takes beside torch's tensors: libraries and CUDA graphs, and what it needs outside the budget."""

from typing import Final

from specdecode_operator.sizing.base.devices import memory_coefficients
from specdecode_operator.sizing.base.eras import Runner, Sampler, sizing_facts
from specdecode_operator.sizing.base.formula import described, named
from specdecode_operator.sizing.base.units import ceil_div
from specdecode_operator.sizing.memory.activation import activation_bytes, unprofiled_latent_bytes
from specdecode_operator.sizing.memory.adaptive import adaptive_graphs, confidence_tables_bytes
from specdecode_operator.sizing.memory.buffers import state_bytes
from specdecode_operator.sizing.memory.captures import capture_sizes, further_graphs
from specdecode_operator.sizing.memory.sampling import verification_bytes
from specdecode_operator.sizing.pair.pair import Pair, Parallelism, loaded_draft
from specdecode_operator.vocabulary import METHODS_WITH_HIDDEN_STATES, Precision

_QUANTIZATION_STEPS: Final = {Precision.FP8: 1, Precision.INT8: 2}
"""Kernels that quantize activations before each projection."""

_STACK_BYTES: Final = {0: 768, 4: 880, 2: 1504, 3: 1888, 1: 1696}
"""Stack a thread of the Triton top-k kernel, compiled for sm90, by how far the vocabulary can be read in vectors.

Keys: 0 for a multiple of 16, 4 of 4, 2 of 2, else the remainder by 4 (Triton 3.6, ptxas -v).
"""


def non_torch_bytes(pair: Pair, split: Parallelism) -> int:
    """Return NCCL, workspaces and modules inside the budget."""
    era = pair.era
    sizes = memory_coefficients().non_torch
    # Over PCIe NCCL's buffers are the host's (its transport SHM) or small, and vLLM has neither symmetric memory nor a
    # fused all-reduce there: public logs of such cards have no more than those of one GPU.
    alone = shares_no_layer(pair, split) or not pair.limits.has_nvlink
    if era.runner is Runner.V2:
        return sizes.v2_one_gpu if alone else sizes.v2_several_gpus
    layers = named(ceil_div(pair.target.num_layers, split.pipeline), "layers", like=split.tensor)
    if split.tensor == 1 or alone:
        base = sizes.pipeline_only if split.pipeline > 1 and split.tensor == 1 else sizes.one_gpu
    elif split.tensor == 2:  # noqa: PLR2004 (measured for two apart)
        base = sizes.two_gpus + sizes.two_gpus_per_layer * layers
    elif split.tensor < 8:  # noqa: PLR2004 (estimated apart)
        base = sizes.more_gpus + sizes.more_gpus_per_layer * layers
    else:
        base = sizes.eight_gpus + sizes.eight_gpus_per_layer * layers
    if era.sampler is not Sampler.TRITON:
        return base
    return base + named(_local_memory_bytes(pair.target.vocab_size), "of stacks of the top-k kernel", like=split.tensor)


def shares_no_layer(pair: Pair, split: Parallelism) -> bool:
    """Whether no other GPU has a part in a GPU's layers: not by tensor parallelism, nor by experts of its copies."""
    return split.tensor == 1 and (split.data == 1 or not pair.target.has_experts)


def _local_memory_bytes(vocabulary: int) -> int:
    """Return what the driver reserves for the stacks of the top-k kernel beyond the default.

    Only vocabularies that are no multiple of four need more: Granite's 49,155.
    """
    coefficients = memory_coefficients()
    remainder = vocabulary % 4
    key = 0 if vocabulary % 16 == 0 else remainder or 4
    return coefficients.resident_threads * max(0, _STACK_BYTES[key] - coefficients.default_stack_bytes)


def graph_bytes(pair: Pair, split: Parallelism) -> int:
    """Return what the engine charges to the budget for CUDA graphs, target and drafter together.

    Measured in vLLM's usual mode, FULL_AND_PIECEWISE, which captures most: for the others it is an upper bound.
    """
    era = pair.era
    if not pair.limits.captures_graphs or not era.charges_graphs:
        return 0
    sizes = memory_coefficients().graphs
    if era.runner is Runner.V2:
        of_sizes = (capture_sizes(pair) - 1 + further_graphs(pair) + adaptive_graphs(pair)) * sizes.v2_size
        of_sizes += _timed_steps_bytes(pair, split)
        if pair.method not in METHODS_WITH_HIDDEN_STATES:
            return sizes.v2 + of_sizes
        # A head's decoding is captured for each number above 1 (spec_decode/target_dependent_ar/cudagraph_utils.py).
        lengths = 1 + len(pair.other_draft_lengths - {0, 1})
        return sizes.v2 + of_sizes + named(sizes.v2_draft_head * lengths, "of the drafter", like=of_sizes)
    per_layer = sizes.v1_layer + (sizes.v1_expert_layer if pair.target.has_experts else 0)
    full = sum(graph_layers(pair, split)) * per_layer + quantization_steps(pair) * sizes.v1_quantization_step
    of_sizes = full * (capture_sizes(pair) - 1) // (sizes.v1_sizes - 1)
    if not pair.drafts_in_parallel:
        return of_sizes
    # The second size that is captured opens a segment of torch's allocator, and the estimate takes that for what each
    # further size needs (v1/worker/gpu_model_runner.py, profile_cudagraph_memory), as it does under V2.
    return of_sizes + named((capture_sizes(pair) - 1) * sizes.v2_size, "of the parallel drafter", like=of_sizes)


def _timed_steps_bytes(pair: Pair, split: Parallelism) -> int:
    """Return what the estimate for graphs has of the steps by which adaptive verification learns their costs.

    Up to 0.32 they run in the estimate, too, up to a full step, and what they leave in torch's cache is taken for
    graphs (v1/worker/gpu/model_runner.py, capture_model).
    """
    if not pair.adaptive_verification or not sizing_facts(pair.limits.engine_version)["charges_timed_steps"]:
        return 0
    return described(activation_bytes(pair, split), "of steps that are timed")


def graph_pool_bytes(pair: Pair, split: Parallelism) -> int:
    """Return what CUDA graphs really take after the start, charged to the budget or not."""
    if not pair.limits.captures_graphs:
        return 0
    sizes = memory_coefficients().graphs
    if pair.era.runner is Runner.V2:
        return sizes.v2_pool
    per_layer = sizes.v1_pool_layer + (sizes.v1_pool_expert_layer if pair.target.has_experts else 0)
    full = sum(graph_layers(pair, split)) * per_layer + quantization_steps(pair) * sizes.v1_pool_quantization_step
    return sizes.v1_pool + full * (capture_sizes(pair) - 1) // (sizes.v1_sizes - 1)


def graph_layers(pair: Pair, split: Parallelism) -> tuple[int, int]:
    """Return the layers of target and draft captured by V1: each twice, whole and in pieces; a draft's in pieces only.

    So a draft's count half.
    """
    draft = loaded_draft(pair)
    layers, drafting = (
        ceil_div(pair.target.num_layers, split.pipeline),
        ceil_div(draft[0].num_layers, 2) if draft else 0,
    )
    return (
        named(layers, "layers of the target", like=split.tensor),
        named(drafting, "of the drafter", like=split.tensor),
    )


def quantization_steps(pair: Pair) -> int:
    """Return the kernels before each projection that quantize what it reads."""
    return _QUANTIZATION_STEPS.get(pair.target_precision, 0)


def runtime_overrun_bytes(pair: Pair, tensor: int) -> int:
    """Return what verification takes at run time that no profiling run has seen."""
    return verification_bytes(pair, tensor)


def slack_bytes(pair: Pair, total_bytes: int, requested_bytes: int, split: Parallelism) -> int:
    """Return what stays outside the budget once the CUDA context, what is not charged, and a reserve are there."""
    return free_outside_bytes(total_bytes, requested_bytes, uncharged_bytes(pair, split))


def uncharged_bytes(pair: Pair, split: Parallelism) -> int:
    """Return what the engine takes outside the budget."""
    era = pair.era
    uncharged = confidence_tables_bytes(pair) + (0 if era.charges_state else state_bytes(pair, split))
    uncharged += memory_coefficients().cublas_workspace_bytes if era.cublas_before_snapshot else 0
    uncharged += unprofiled_latent_bytes(pair, split)
    if not era.charges_graphs:
        uncharged += graph_pool_bytes(pair, split)
    return uncharged


def free_outside_bytes(total_bytes: int, requested_bytes: int, uncharged_bytes: int) -> int:
    """Return what is left of a GPU beside the budget and what is not charged to it."""
    coefficients = memory_coefficients()
    free = total_bytes - requested_bytes - coefficients.context_bytes - coefficients.slack_reserve_bytes
    return free - named(uncharged_bytes, "that is not charged") if uncharged_bytes else free
