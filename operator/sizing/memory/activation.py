"""The peak of the engine's profiling run beyond what stays allocated.

Followed tensor by tensor through vLLM's profile_run and _dummy_run: what is
alive at the largest of encoding images, the target's forward pass, the
draft's, and sampling; and what the run makes and keeps.
"""

from typing import Final

from specdecode_operator.sizing.base.devices import memory_coefficients
from specdecode_operator.sizing.base.eras import Runner
from specdecode_operator.sizing.base.formula import described
from specdecode_operator.sizing.base.units import ceil_div
from specdecode_operator.sizing.memory.forward import expert_workspace_bytes, forward_bytes
from specdecode_operator.sizing.memory.latent import (
    INDEX_LOGITS_BYTES,
    index_workspace_bytes,
    latent_parts_bytes,
    profiles_latent_parts,
)
from specdecode_operator.sizing.memory.proposing import joining_bytes, proposing_bytes
from specdecode_operator.sizing.memory.refining import refining_bytes, refining_scratch_bytes
from specdecode_operator.sizing.memory.sampling import profiled_sampling_bytes
from specdecode_operator.sizing.model.geometry import ModelGeometry
from specdecode_operator.sizing.model.precision import Scales
from specdecode_operator.sizing.pair.pair import Pair, Parallelism, loaded_draft
from specdecode_operator.sizing.weights.stages import Stage, stages, whole_model
from specdecode_operator.sizing.weights.weights import padded_vocabulary
from specdecode_operator.vocabulary import METHODS_WITH_HIDDEN_STATES, Method, Precision

_GPT_OSS: Final = "GptOss"

_Draft = tuple[ModelGeometry, Precision]
"""A draft that is loaded, and its precision."""

_METHODS_PROFILED: Final = (Method.DRAFT_MODEL, *METHODS_WITH_HIDDEN_STATES)
"""Methods whose draft runs in the profiling run (_dummy_run)."""


def activation_bytes(pair: Pair, split: Parallelism, stage: Stage | None = None) -> int:
    """Return the peak of one step beyond what stays allocated, on one pipeline stage; by default the last.

    Only the last stage samples and runs the draft.
    """
    if stage is None:
        stage = stages(pair.target, split.pipeline)[-1]
    draft = loaded_draft(pair)
    kept, scratch = _expert_bytes(pair, draft, split, stage)
    if (reserved := latent_parts_bytes(pair, split.tensor)) and profiles_latent_parts(pair):
        # Both are served from one workspace (v1/worker/workspace.py).
        kept = max(kept, described(reserved, "of parts of the context"))
    if gathered := index_workspace_bytes(pair):
        kept = max(kept, described(gathered, "of gathered keys of indexers"))
        scratch = max(scratch, INDEX_LOGITS_BYTES)
    if pair.era.peaks_in_pieces and not pair.era.cublas_before_snapshot:
        kept += memory_coefficients().cublas_workspace_bytes
    target, limits = pair.target, pair.limits
    states_bytes = limits.max_num_batched_tokens * target.hidden_size * target.dtype_bytes
    if pair.era.runner is Runner.V1 and not stage.is_first:
        # Hidden states and residual of the stage before, made in the run; V2 makes them before.
        kept += 2 * states_bytes
    # Hidden states of its layers that the target hands to the draft (EAGLE-3, DFlash, DSpark).
    given = draft[0].head.auxiliary_states * states_bytes if draft and draft[0].head else 0
    step = forward_bytes(pair, target, stage, pair.target_precision, split) + given + scratch
    peak = described(step, "in the target's step")
    if stage.is_last:
        drafting = _draft_pass_bytes(pair, draft, split) + states_bytes + given
        sampling = profiled_sampling_bytes(pair, split.tensor)
        peak = max(peak, described(drafting, "in the draft's step"), described(sampling, "in sampling"))
        if draft is not None and pair.era.runner is Runner.V2:
            proposing = _proposing_bytes(pair, draft[0], split.tensor) + states_bytes + given
            peak = max(peak, described(proposing, "in proposing"))
            kept += refining_scratch_bytes(pair, draft[0])
        if draft is not None and pair.method in _METHODS_PROFILED:
            compiling = compiling_bytes(pair, draft[0], split.tensor) + states_bytes + given
            peak = max(peak, described(compiling, "in compiling the draft"))
    kept = described(kept, "held beside it")
    if not target.tower.item_tokens:
        # Compiled before the first run, which makes what is held.
        compiling = compiling_bytes(pair, target, split.tensor) if stage.is_first else 0
        return max(peak + kept, described(compiling, "in compiling"))
    encoding, encoded = _encoder_bytes(pair, split, stage)
    encoding, encoded = described(encoding, "in encoding"), described(encoded, "of encoded images")
    return max(encoding, peak + encoded) + kept


def compiling_bytes(pair: Pair, model: ModelGeometry, tensor: int) -> int:
    """Return what compiling a model takes at a start without a compile cache; 0 if the start compiles nothing.

    vLLM sets benchmark_combo_kernel (config/compilation.py, CompilationConfig.__post_init__): torch times the kernels
    that it may join, and fills tensors with random numbers for all that they read and write
    (torch/_inductor/codegen/triton.py, codegen_kernel_benchmark). The first kernel reads the embedding. So a second
    table of that size stands beside the weights, with the buffer that flushes the L2 cache between repetitions
    (torch/_inductor/runtime/benchmarking.py). The kernel writes the residual and the normed states. That of EAGLE-3
    reads the target's states, too, and writes both side by side into a tensor that each repetition clones
    (llama_eagle3.py, forward).
    """
    if not pair.limits.compiles_anew or pair.limits.enforce_eager or not model.layers:
        return 0
    table = ceil_div(padded_vocabulary(model.vocab_size), tensor) * model.hidden_size * model.dtype_bytes
    states = 5 if model.head is not None and model.head.auxiliary_states else 2
    written = states * pair.limits.max_num_batched_tokens * model.hidden_size * model.dtype_bytes
    return table + written + memory_coefficients().l2_bytes


def _draft_pass_bytes(pair: Pair, draft: _Draft | None, split: Parallelism) -> int:
    """Return the peak of the draft's pass, which runs while the target's hidden states are held (dummy_run)."""
    if draft is None or pair.method not in _METHODS_PROFILED:
        return 0
    geometry, precision = draft
    return forward_bytes(pair, geometry, whole_model(geometry), precision, split)


def unprofiled_latent_bytes(pair: Pair, split: Parallelism) -> int:
    """Return by how much the workspace grows after the profiling run for parts of the context."""
    reserved = latent_parts_bytes(pair, split.tensor)
    if not reserved or profiles_latent_parts(pair):
        return 0
    kept, _ = _expert_bytes(pair, loaded_draft(pair), split, stages(pair.target, split.pipeline)[-1])
    return max(0, reserved - kept)


def _proposing_bytes(pair: Pair, draft: ModelGeometry, tensor: int) -> int:
    """Return what proposing takes before and after the draft's pass, which V1 leaves out of the profiling run."""
    if draft.head is None:
        return proposing_bytes(pair, draft, tensor)
    refines = draft.head.refiner is not None
    proposing = refining_bytes(pair, draft, tensor) if refines else proposing_bytes(pair, draft, tensor)
    return max(joining_bytes(pair, draft), proposing)


def _expert_bytes(pair: Pair, draft: _Draft | None, split: Parallelism, stage: Stage) -> tuple[int, int]:
    """Return the workspace of the experts that stays, and what they take for a moment.

    All layers, the draft's too, share one workspace (v1/worker/workspace.py).
    Where the kernel takes it, only the experts' output stays.
    """
    if not (pair.target.has_experts or (draft is not None and draft[0].has_experts)):
        return 0, 0
    tokens = pair.limits.max_num_batched_tokens
    models = [(pair.target, stage, pair.target_precision)]
    if draft is not None and stage.is_last:
        models.append((draft[0], whole_model(draft[0]), draft[1]))
    kept = scratch = 0
    for model, layers, precision in models:
        workspace = expert_workspace_bytes(model, layers, precision, tokens, split)
        if not workspace:
            continue
        if model.architecture.startswith(_GPT_OSS) and precision is Precision.MXFP4:
            # Its Triton kernels take all by themselves (fused_moe/gpt_oss_triton_kernels_moe.py).
            scratch = max(scratch, workspace)
        elif _kernel_takes_scratch(pair, model, precision, split):
            kept = max(kept, tokens * model.hidden_size * model.dtype_bytes)
            scratch = max(scratch, workspace)
        else:
            kept = max(kept, workspace)
    return kept, scratch


def _kernel_takes_scratch(pair: Pair, model: ModelGeometry, precision: Precision, split: Parallelism) -> bool:
    """Whether FlashInfer's CUTLASS kernels run the experts on Hopper (vLLM, fused_moe/oracle).

    Unquantized ones in some versions, not with data parallelism; FP8 with one
    scale a tensor for weights and inputs in all (FlashInferExperts,
    _supports_quant_scheme). Block FP8 with whole experts a rank too, but what
    it takes is not known: it is counted as kept.
    """
    if precision is Precision.BF16:
        return pair.era.experts_scratch_in_kernel and split.data == 1
    stored = model.weight_format(precision)
    return precision is Precision.FP8 and stored.scales is Scales.TENSOR and stored.static_inputs


def _encoder_bytes(pair: Pair, split: Parallelism, stage: Stage) -> tuple[int, int]:
    """Return the encoder's peak in the profiling run, and its inputs and outputs, alive through the text's run.

    As many of the largest items as a step holds tokens of (vLLM, multimodal/encoder_budget.py);
    V2 encodes on the first stage only.
    """
    tower, width, era = pair.target.tower, pair.target.dtype_bytes, pair.era
    if not era.profiles_encoder or (era.runner is Runner.V2 and not stage.is_first):
        return 0, 0
    items = encoder_items(pair)
    inputs = items * tower.item_elements * width
    outputs = items * tower.item_tokens * tower.output_levels * pair.target.hidden_size * width
    peak = items * (tower.item_state_elements + tower.item_inner_elements // split.tensor) * width
    return inputs + peak + tower.table_bytes, inputs + outputs + tower.table_bytes


def encoder_items(pair: Pair) -> int:
    """Return with how many of the largest images vLLM profiles the encoder (_get_max_items); a video is several."""
    limits, tower = pair.limits, pair.target.tower
    images = max(1, min(tower.longest_item, limits.max_model_len // tower.item_tokens))
    tokens = images * tower.item_tokens
    by_budget = max(limits.max_num_batched_tokens, tokens) // tokens
    by_requests = limits.max_num_seqs * max(1, limits.max_model_len // tokens)
    return images * min(by_budget, by_requests)
