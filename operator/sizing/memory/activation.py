"""Peak activation memory of vLLM's profiling run: forward, drafting, sampling, image encoding.

The computation follows profile_run and _dummy_run tensor by tensor. The peak is the largest of image encoding, the
target's forward pass, the draft's forward pass, and sampling; allocations that the run keeps are added.

vLLM compiles a model in pieces that end at each attention (compilation/backends.py, split_graph). A piece starts
with the attention's output and the residual, which its caller holds, and makes the next layer's queries, keys and
values. So the peak is either around an attention or around the feed-forward layer after it.

Model runner V2 profiles the draft's proposal in full (v1/worker/gpu/model_runner.py, _dummy_run); V1 runs the
draft's layers only (v1/spec_decode/llm_base_proposer.py, dummy_run). XPress refinement follows
model_executor/models/qwen3_xpress.py, jacobi_refine_greedy.

`on_product` selects the kernels for a GPU product, such as Triton's for latent attention, which reserves workspace
for parts of a context. It returns the pair with these kernels.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from specdecode_operator.enums import FLOAT32_BYTES, METHODS_OF_BLOCKS, METHODS_WITH_HIDDEN_STATES, Method, Precision
from specdecode_operator.sizing.arithmetic import GIB, Named, ceil_div, described, named
from specdecode_operator.sizing.devices import generation_of, memory_coefficients
from specdecode_operator.sizing.geometry import (
    DeltaNet,
    DenseMlp,
    ExpertKernel,
    Experts,
    LatentAttention,
    Layer,
    ModelGeometry,
    Refiner,
    Scales,
    SelectiveScan,
    SelfAttention,
    SingleMixer,
    StateSpace,
    padded_vocabulary,
)
from specdecode_operator.sizing.pair import (
    Pair,
    Parallelism,
    block_places,
    effective_batch,
    loaded_draft,
    profiled_requests,
)
from specdecode_operator.sizing.rank_layers import Stage, groups_per_rank, kv_heads_per_rank, stages, whole_model
from specdecode_operator.sizing.result_cache import MEMO_SIZE
from specdecode_operator.sizing.version_rules import Runner, Sampler, sizing_facts

_FLOAT32_COPIES: Final = 3
"""Float32 tensors as large as the logits that the sampler makes."""

_LARGEST_PIECE_BYTES: Final = Named(GIB, "of a piece in float32")
"""Maximum piece of logits that V2 copies to float32 together (v1/worker/gpu/spec_decode/rejection_sampler.py)."""


def profiled_sampling_bytes(pair: Pair, tensor: int) -> int:
    """Return the bytes of the profiling run's sampling: hidden states of a full step, sampled rows and logits.

    vLLM, v1/worker/gpu_model_runner.py and v1/worker/gpu/model_runner.py, _dummy_sampler_run. V2 selects the rows once;
    V1 also fills a second tensor with random numbers. Logits stand as computed, gathered over the ranks, and in float32
    (a copy even of float32, as a log of vLLM 0.19 with --dtype float32 shows).
    """
    target, tokens, requests = pair.target, pair.limits.max_num_batched_tokens, profiled_requests(pair)
    state_bytes, vocabulary = target.hidden_size * target.dtype_bytes, target.vocab_size
    logits = requests * padded_vocabulary(vocabulary) * target.dtype_bytes
    if pair.era.runner is Runner.V2:
        # v1/worker/gpu/sample/sampler.py: up to 0.32 the run filters nothing; later it makes a second pass with all
        # that a request can ask for: in float32, masked, and their softmax.
        sampling = _gathered_bytes(logits, tensor)
        if pair.era.copies_logits_to_float32:
            copies = _FLOAT32_COPIES if pair.era.sampler is Sampler.FLASHINFER else 1
            sampling = max(sampling, logits + copies * requests * vocabulary * FLOAT32_BYTES)
        return (tokens + requests) * state_bytes + sampling
    # v1/sample/sampler.py and topk_topp_sampler.py: the softmax, and the noise of the draw or, with FlashInfer, the
    # masked logits. The Triton kernel keeps a row for each multiprocessor. A draft's rejection sampler runs after it.
    sampling = logits + _FLOAT32_COPIES * (requests * vocabulary) * FLOAT32_BYTES
    if pair.num_speculative_tokens:
        sampling = _v1_rejection_bytes(pair, requests, requests) + _v1_probabilities_bytes(pair, requests)
    if pair.era.sampler is Sampler.TRITON:
        sampling += min(memory_coefficients().multiprocessors, requests) * vocabulary * FLOAT32_BYTES
    return (tokens + 2 * requests) * state_bytes + sampling


def verification_bytes(pair: Pair, tensor: int) -> int:
    """Return the bytes of verifying K + 1 rows per request beyond the profiling run; 0 without a draft.

    V2 (v1/worker/gpu/spec_decode/rejection_sampler.py): this rank's logits, the gathered rows and their copy, and a
    float32 piece of at most 1 GiB (MAX_CHUNK_BYTES). V1: its profiling run verified one proposed token per request. A
    draft that samples leaves its probabilities there through the whole next step (v1/worker/gpu_model_runner.py,
    _draft_probs), and the rows to verify are gathered (_get_spec_decode_draft_probs); V2 keeps logits, which
    are part of its state. Entropy (v1/spec_decode/fly.py, compute_fly_entropy) copies such a piece once more, in
    logsumexp; on V1 it reads the existing softmax.
    """
    vocabulary, proposed, limits = pair.target.vocab_size, pair.num_speculative_tokens, pair.limits
    if not proposed:
        return 0
    all_requests = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    most = min(limits.max_num_seqs * (proposed + 1), limits.max_num_batched_tokens)
    if pair.adaptive_verification:
        # No more than one float32 piece holds, or one row per request (get_num_tokens).
        most = min(most, max(all_requests, _LARGEST_PIECE_BYTES // (vocabulary * FLOAT32_BYTES)))
    rows = named(most, "rows")
    logits = rows * vocabulary * pair.target.dtype_bytes
    if pair.era.runner is Runner.V2:
        gathered = 2 * logits if tensor > 1 else logits
        piece = min(rows * vocabulary * FLOAT32_BYTES, _LARGEST_PIECE_BYTES)
        return gathered + ceil_div(logits, tensor) + (2 * piece if pair.checks_by_entropy else piece)
    requests = ceil_div(rows, proposed + 1)
    verified = _v1_rejection_bytes(pair, requests, proposed * requests)
    gathered = _v1_probabilities_bytes(pair, proposed * requests)
    profiled = _v1_rejection_bytes(pair, all_requests, all_requests) + _v1_probabilities_bytes(pair, all_requests)
    return _v1_probabilities_bytes(pair, proposed * all_requests) + max(0, verified + gathered - profiled)


def _v1_probabilities_bytes(pair: Pair, rows: int) -> int:
    """Return the bytes of the distributions that a sampling draft drew its tokens from; 0 for a greedy draft.

    As wide as the target's logits, in float32 (vLLM, v1/spec_decode/llm_base_proposer.py,
    compute_probs_and_sample_next_token). Heads with a smaller vocabulary spread their logits over the target's
    (llama_eagle3.py, compute_logits).
    """
    if not pair.samples_drafts or loaded_draft(pair) is None:
        return 0
    return rows * pair.target.vocab_size * FLOAT32_BYTES


def _v1_rejection_bytes(pair: Pair, bonus_rows: int, target_rows: int) -> int:
    """Return the peak of the rejection sampler (vLLM, v1/sample/rejection_sampler.py, RejectionSampler.forward).

    Kept: all rows and the bonus rows as computed, the bonus rows as float32 for log probabilities. The target's rows:
    raw, cloned, softmax. For each request the noise and its reciprocal (sample_recovered_tokens, q and inv_q). The
    profiling run has one of each per request for any K.
    """
    kept = (2 * bonus_rows + target_rows) * pair.target.dtype_bytes + bonus_rows * FLOAT32_BYTES
    return (kept + (3 * target_rows + 2 * bonus_rows) * FLOAT32_BYTES) * pair.target.vocab_size


def _gathered_bytes(logits_bytes: int, tensor: int) -> int:
    """Return the peak of gathering logits: this rank's part, the gathered rows, and their copy in order.

    vLLM, distributed/device_communicators/base_device_communicator.py, all_gather; a single rank does not gather.
    """
    return 2 * logits_bytes + ceil_div(logits_bytes, tensor) if tensor > 1 else logits_bytes


_GPT_OSS: Final = "GptOss"
_TRITON: Final = "TRITON_MLA"
_SCALED_TOGETHER: Final = 128
_CONTEXT_OF_A_PART: Final = 512
_TRITON_ALONE: Final = frozenset({"Ampere", "Ada", "Blackwell RTX"})
_MOST_PARTS: Final = 2 * 108
"""Two for each multiprocessor of an A100. RTX PRO 6000 has 188 multiprocessors and L40S 142: the margin of uncalibrated
GPUs covers the rest."""


_WITHOUT_NVLINK: Final = frozenset({"Ada", "Blackwell RTX"})
"""Generations whose cards have no connector for it (NVIDIA's data sheets)."""


def on_product(pair: Pair, product: str) -> Pair:
    """Return the pair with the kernels that the engine selects on a GPU product.

    For latent attention, Ampere, Ada and Blackwell RTX have Triton's only (vllm/platforms/cuda.py); a requested kernel
    stays. Sparse attention has its own kernels: on Blackwell vLLM prefers FlashInfer's for an FP8 cache
    (platforms/cuda.py, _get_backend_priorities; v1/attention/backends/mla/flashinfer_mla_sparse.py), which reads it
    plain; FlashMLA's, of Hopper, makes it fp8_ds_mla (mla_attention.py, _canonicalize_sparse_mla_kv_cache_dtype). On
    Hopper vLLM prefers Triton to Marlin for the experts of gpt-oss (fused_moe/oracle/mxfp4.py,
    _get_priority_backends_for_gpt_oss; experts/gpt_oss_triton_kernels_moe.py), which pads their scales, not their
    weights.
    """
    generation, stored = generation_of(product), pair.target.checkpoint
    if generation in _WITHOUT_NVLINK and pair.limits.has_nvlink:
        pair = replace(pair, limits=replace(pair.limits, has_nvlink=False))
    is_gpt_oss = pair.target.architecture.startswith(_GPT_OSS)
    if generation == "Hopper" and is_gpt_oss and stored is not None and stored.precision is Precision.MXFP4:
        keeps = sizing_facts(pair.limits.engine_version)["keeps_stored_expert_scales"]
        kernel = ExpertKernel.TRITON_BESIDE_SCALES if keeps else ExpertKernel.TRITON
        pair = replace(pair, target=_with_kernel(pair.target, kernel))
    if pair.target.has_sparse_attention:
        return replace(pair, target=_with_plain_cache(pair.target)) if generation == "Blackwell" else pair
    chosen = pair.limits.attention_backend is not None or generation not in _TRITON_ALONE
    if chosen or not any(isinstance(mixer, LatentAttention) for mixer in pair.target.attentions):
        return pair
    return replace(pair, limits=replace(pair.limits, attention_backend=_TRITON))


@lru_cache(maxsize=MEMO_SIZE)
def _with_plain_cache(model: ModelGeometry) -> ModelGeometry:
    layers = []
    for layer in model.layers:
        if isinstance(mixer := layer.mixer, LatentAttention):
            mixer = replace(mixer, packs_cache=False)
        layers.append(replace(layer, mixer=mixer))
    return replace(model, layers=tuple(layers))


@lru_cache(maxsize=MEMO_SIZE)
def _with_kernel(model: ModelGeometry, kernel: ExpertKernel) -> ModelGeometry:
    stored = model.checkpoint
    return model if stored is None else replace(model, checkpoint=replace(stored, expert_kernel=kernel))


def latent_parts_bytes(pair: Pair, tensor: int) -> int:
    """Return the bytes that Triton's kernel reserves on each GPU for parts of a context; 0 with other kernels.

    vLLM, v1/attention/backends/mla/triton_mla.py, _compute_num_kv_splits and _reserve_attn_logits_workspace.
    """
    if pair.limits.attention_backend != _TRITON:
        return 0
    latent = [mixer for mixer in pair.target.attentions if isinstance(mixer, LatentAttention)]
    parts = 1 << (max(1, pair.limits.max_model_len // _CONTEXT_OF_A_PART) - 1).bit_length()
    parts = named(min(parts, _MOST_PARTS), "parts", like=pair.limits.max_num_seqs)
    rows = pair.limits.max_num_seqs * (1 + pair.num_speculative_tokens) * parts
    return max(
        (rows * ceil_div(each.num_heads, tensor) * (each.kv_rank + 1) * FLOAT32_BYTES for each in latent), default=0
    )


_INDEXED_LENGTHS: Final = 40
_LONG_INDEXED_LENGTHS: Final = 16
_LONG_FROM: Final = 256 * 1024
"""Number of longest requests of which the indexer gathers keys, and their number beyond this length from 0.33 on: eight
times the workspace factor of FlashMLA (v1/attention/backends/mla/indexer.py, get_max_prefill_buffer_size)."""

_TOP_K_BYTES: Final = 1 << 20
"""Workspace of the kernel that chooses (sparse_attn_indexer.py, RADIX_TOPK_WORKSPACE_SIZE)."""

_INDEX_LOGITS_BYTES: Final = 512 << 20
"""Tensor that replaces an indexer's logits in the profiling run (VLLM_SPARSE_INDEXER_MAX_LOGITS_MB)."""


def index_workspace_bytes(pair: Pair) -> int:
    """Return the bytes that indexers of sparse attention reserve for gathered keys; 0 without indexers.

    vLLM, model_executor/layers/sparse_attn_indexer.py, sparse_attn_indexer: FP8 keys with their scales.
    """
    mixers = [mixer for mixer in pair.target.attentions if isinstance(mixer, LatentAttention)]
    widths = [mixer.indexer.head_dim for mixer in mixers if mixer.indexer is not None]
    if not widths:
        return 0
    length, lengths = pair.limits.max_model_len, _INDEXED_LENGTHS
    if length > _LONG_FROM and sizing_facts(pair.limits.engine_version)["gathers_less_of_long_requests"]:
        lengths = _LONG_INDEXED_LENGTHS
    key_bytes = max(widths) + max(widths) // _SCALED_TOGETHER * FLOAT32_BYTES
    return named(lengths, "requests", like=length) * length * key_bytes + _TOP_K_BYTES


def _profiles_latent_parts(pair: Pair) -> bool:
    """Whether the profiling run reserves the parts (mla_attention.py, forward_impl), or the run after it."""
    return bool(sizing_facts(pair.limits.engine_version)["profiles_latent_parts"])


_TRANSITIONS: Final = 3
"""Additional logits of a place in DSpark: of the place before, the bias, and their sum (_sample_sequential)."""


def proposing_bytes(pair: Pair, draft: ModelGeometry, tensor: int) -> int:
    """Return the peak of proposing: the states that a draft's layers return, the rows selected from them, their logits.

    Heads that propose blocks take all places of all requests together (dflash/speculator.py, _generate_draft), others
    one per request (target_dependent_ar/speculator.py and standalone_ar/speculator.py, _prefill). EAGLE-3 returns two
    tensors, and keeps its concatenation with the target's states. Logits of a smaller vocabulary are spread over the
    target's (qwen3_dflash.py and llama_eagle3.py, compute_logits).
    """
    tokens, requests, head = pair.limits.max_num_batched_tokens, profiled_requests(pair), draft.head
    rows = requests
    if pair.method in METHODS_OF_BLOCKS:
        rows = named(requests * pair.num_speculative_tokens, "proposed tokens", like=requests)
        tokens = min(tokens, requests * block_places(pair))
    elif pair.method == Method.EAGLE3:
        tokens *= 3
    states = (tokens + rows) * draft.hidden_size
    if head and head.returns_width:
        # In addition to its own states it returns states of the target's width (gemma4_mtp.py).
        states += tokens * head.returns_width
    vocabulary = (head.output_rows if head else 0) or draft.vocab_size
    padded = padded_vocabulary(vocabulary) * draft.dtype_bytes
    made = 0
    if pair.method == Method.DSPARK:
        made = _TRANSITIONS * requests * padded
    elif head and head.copied_rows:
        made = rows * head.copied_rows * draft.hidden_size * draft.dtype_bytes
    elif vocabulary != draft.vocab_size:
        made = rows * draft.vocab_size * draft.dtype_bytes
    return states * draft.dtype_bytes + max(_gathered_bytes(rows * padded, tensor), rows * padded + made)


_INT64_BYTES: Final = 8

_CHUNK_TOKENS: Final = 4096
_CHUNK_BYTES: Final = 4 + _INT64_BYTES
"""Without a limit on candidates the best of each chunk of tokens is kept, with its score (_scratch_buffers)."""


def refining_bytes(pair: Pair, draft: ModelGeometry, tensor: int) -> int:
    """Return the peak of refining the blocks of a full step; 0 for drafts without a refiner.

    The states and logits of all places, first with a copy of the logits of places to fill, then for each of these the
    rows of its candidates in the second table, their logits before and after, and their ids.
    """
    refiner = draft.head.refiner if draft.head else None
    if refiner is None:
        return 0
    requests, width, vocabulary = effective_batch(pair), draft.dtype_bytes, draft.vocab_size
    places = named(requests * refiner.places, "places")
    logits = places * vocabulary * width
    gathering = logits + ceil_div(logits, tensor) if tensor > 1 else 0
    filled = named(requests * (refiner.places - 1), "places to fill")
    copied = filled * vocabulary * width
    chosen = filled * _candidates(pair, refiner) * ((refiner.rank + 2) * width + _INT64_BYTES)
    return places * draft.hidden_size * width + logits + max(gathering, copied, chosen)


def refining_scratch_bytes(pair: Pair, draft: ModelGeometry) -> int:
    """Return the bytes that the first refining pass keeps: logits twice for all requests, if it chooses from all."""
    refiner = draft.head.refiner if draft.head else None
    if refiner is None or _candidates(pair, refiner):
        return 0
    width, vocabulary = draft.dtype_bytes, draft.vocab_size
    of_place = (2 * vocabulary + refiner.rank) * width + ceil_div(vocabulary, _CHUNK_TOKENS) * _CHUNK_BYTES
    return pair.limits.max_num_seqs * named(refiner.places - 1, "places to fill") * of_place


def _candidates(pair: Pair, refiner: Refiner) -> int:
    return refiner.candidates if pair.refined_candidates is None else pair.refined_candidates


_COPIES_ACTIVATIONS: Final = (Precision.INT8,)
"""Precisions whose inputs a separate operator copies to eight bits (scaled_int8_quant).

For FP8, the kernel that makes the input writes it in place of 16 bits (config/vllm.py, enable_act_fusion).
"""

_CONTEXT_TOKENS_MOST: Final = 64 * 1024
_CONTEXT_REQUESTS: Final = 8
_CONTEXT_BLOCKS_PER_REQUEST: Final = 4
"""Eight full requests or four blocks each, 64 Ki tokens at most."""


def forward_bytes(pair: Pair, model: ModelGeometry, stage: Stage, precision: Precision, split: Parallelism) -> int:
    """Return the peak of a full step in one pipeline stage of the pair's target or draft.

    Latent attention sets up one chunk of context whole for the profile (vLLM,
    model_executor/layers/attention/mla_attention.py, forward_impl and determine_chunked_prefill_workspace_size). A
    kernel that is tuned at its first launch flushes the L2 cache with a buffer of its size; engines that do not compile
    do not tune.
    """
    step = _step(model, stage, precision, split)
    limits, tokens = pair.limits, pair.limits.max_num_batched_tokens
    around_attention = tokens * step.attention_bytes
    if step.context_width:
        by_requests = _CONTEXT_BLOCKS_PER_REQUEST * limits.max_num_seqs * limits.block_size
        context_tokens = min(max(_CONTEXT_REQUESTS * limits.max_model_len, by_requests), _CONTEXT_TOKENS_MOST)
        around_attention += context_tokens * step.context_width * model.dtype_bytes
    if not pair.era.peaks_in_pieces:
        return max(around_attention, tokens * step.row_bytes)
    tuning = 0 if limits.enforce_eager else memory_coefficients().l2_bytes
    return max(around_attention, tokens * step.feed_forward_bytes) + tuning


def expert_workspace_bytes(
    model: ModelGeometry, stage: Stage, precision: Precision, tokens: int, split: Parallelism
) -> int:
    """Return the two workspaces of the fused-expert kernels (vLLM, fused_moe/modular_kernel.py, _allocate_buffers).

    Each row is a token at one of its experts: the hidden state or the output of the activation, and the hidden state or
    gate and up together. Triton, Marlin and CUTLASS (FP8) ask for the same sum (workspace_shapes); FlashInfer's CUTLASS
    kernels take it themselves (cutlass_fused_moe_kernels.cuh, getWorkspaceDeviceBufferSizes). Data-parallel ranks
    compute all ranks' tokens.
    """
    return tokens * split.data * _step(model, stage, precision, split).expert_bytes


@dataclass(frozen=True)
class _Step:
    """Bytes of one token on one rank of a stage."""

    attention_bytes: int  # Around the widest attention: the residual, what it reads and what it returns
    feed_forward_bytes: int  # Around the widest feed-forward layer
    row_bytes: int  # Its rows and the residual alone
    expert_bytes: int  # In the workspaces of the experts
    # Keys and values of all heads that latent attention sets up for each token of context; 0 without it
    context_width: int


@lru_cache(maxsize=MEMO_SIZE)
def _step(model: ModelGeometry, stage: Stage, precision: Precision, split: Parallelism) -> _Step:
    layers = [layer for layer, _ in stage.distinct_layers]
    widths = [sum(_widths(mixer, split.tensor)[0] for mixer in layer.mixers) for layer in layers]
    experts = [layer.feed_forward for layer in layers if isinstance(layer.feed_forward, Experts)]
    return _Step(
        attention_bytes=(model.hidden_size + max(widths, default=0)) * model.dtype_bytes,
        feed_forward_bytes=max(
            (_row_bytes(model, layer, split) + _beside_rows_bytes(model, layer, precision, split) for layer in layers),
            default=0,
        ),
        row_bytes=max((_row_bytes(model, layer, split) for layer in layers), default=0),
        expert_bytes=max((_workspace_row(model, each, split) for each in experts), default=0) * model.dtype_bytes,
        context_width=max((_context_width(layer, split.tensor) for layer in layers), default=0),
    )


def _context_width(layer: Layer, tensor: int) -> int:
    latent = [mixer for mixer in layer.mixers if isinstance(mixer, LatentAttention)]
    return sum(ceil_div(mixer.num_heads, tensor) * (mixer.nope_head_dim + mixer.value_head_dim) for mixer in latent)


def _widths(mixer: SingleMixer, tensor: int) -> tuple[int, int]:
    """Return the width alive inside a mixer on one rank, and the width that it passes to the next piece.

    Inside are the outputs of its projections in, and its own. Linear mixers also pass the gate of their norm. Mamba 2
    copies the input of its convolution twice (vLLM, model_executor/layers/mamba/mamba_mixer2.py, conv_ssm_forward,
    which returns early in the profiling run).
    """
    match mixer:
        case SelfAttention():
            heads = ceil_div(mixer.num_heads, tensor)
            keys_and_values = kv_heads_per_rank(mixer.num_kv_heads, tensor) * (mixer.head_dim + mixer.value_dim)
            inputs = heads * mixer.head_dim * (2 if mixer.gated else 1) + keys_and_values
            outputs = heads * mixer.value_dim
        case LatentAttention():
            heads = ceil_div(mixer.num_heads, tensor)
            inputs = heads * (mixer.nope_head_dim + mixer.rope_head_dim) + mixer.kv_rank + mixer.rope_head_dim
            outputs = heads * mixer.value_head_dim
        case DeltaNet():
            values = mixer.num_value_heads * mixer.value_head_dim
            inputs, outputs = ceil_div(mixer.conv_width + values, tensor), ceil_div(2 * values, tensor)
        case StateSpace():
            groups = groups_per_rank(mixer.num_groups, tensor)
            inputs = ceil_div(2 * mixer.width + mixer.num_heads, tensor) + 2 * groups * mixer.state_size
            convolved = mixer.width + 2 * mixer.num_groups * mixer.state_size
            inside = inputs + ceil_div(mixer.width, tensor) + 2 * ceil_div(convolved, tensor)
            return inside, ceil_div(2 * mixer.width, tensor)
        case SelectiveScan():
            inputs = outputs = ceil_div(2 * mixer.width, tensor)
    return inputs + outputs, outputs


def _row_bytes(model: ModelGeometry, layer: Layer, split: Parallelism) -> int:
    """Return the bytes of the residual before and after, and of the feed-forward layer's rows."""
    states, inner = 2, 0
    match layer.feed_forward:
        case DenseMlp() as mlp:
            inner = (3 if mlp.gated else 2) * mlp.intermediate_size // split.tensor
        case Experts() as experts:
            # The sum over the experts is a separate hidden state.
            states = 3
            inner = (3 if experts.gated else 2) * experts.shared_intermediate_size // split.tensor
        case None:
            pass
    return (states * model.hidden_size + inner) * model.dtype_bytes


def _beside_rows_bytes(model: ModelGeometry, layer: Layer, precision: Precision, split: Parallelism) -> int:
    """Return the bytes alive with the rows: the mixers' outputs, and copies of the inputs in eight bits."""
    returned = sum(_widths(mixer, split.tensor)[1] for mixer in layer.mixers) * model.dtype_bytes
    if precision not in _COPIES_ACTIVATIONS or layer.feed_forward is None:
        return returned
    match layer.feed_forward:
        case DenseMlp() as mlp:
            width = mlp.intermediate_size // split.tensor
        case Experts() as experts:
            routed = experts.top_k * _expert_width(experts, split)
            width = max(routed, experts.shared_intermediate_size // split.tensor)
    return returned + model.hidden_size + width


def _workspace_row(model: ModelGeometry, experts: Experts, split: Parallelism) -> int:
    hidden = experts.latent_size or model.hidden_size
    width = _expert_width(experts, split)
    wide = (2 if experts.gated else 1) * width
    return experts.top_k * (max(width, hidden) + max(wide, hidden))


def _expert_width(experts: Experts, split: Parallelism) -> int:
    """Return the width of an expert on one rank; all data-parallel ranks share it (fused_moe/config.py, make)."""
    return experts.intermediate_size if split.expert else experts.intermediate_size // (split.tensor * split.data)


_Draft = tuple[ModelGeometry, Precision]
"""A draft that is loaded, and its precision."""

_METHODS_PROFILED: Final = (Method.DRAFT_MODEL, *METHODS_WITH_HIDDEN_STATES)
"""Methods whose draft runs in the profiling run (_dummy_run)."""


def activation_bytes(pair: Pair, split: Parallelism, stage: Stage | None = None) -> int:
    """Return the peak of one step and the allocations that it keeps, on one pipeline stage; by default the last.

    Only the last stage samples and runs the draft. The draft runs while the target's hidden states are held
    (dummy_run). V1's profiling run omits the memory for proposing before and after the draft's pass.
    """
    if stage is None:
        stage = stages(pair.target, split.pipeline)[-1]
    draft = loaded_draft(pair)
    kept, scratch = _expert_bytes(pair, draft, split, stage)
    if (reserved := latent_parts_bytes(pair, split.tensor)) and _profiles_latent_parts(pair):
        # Both are served from one workspace (v1/worker/workspace.py).
        kept = max(kept, described(reserved, "of parts of the context"))
    if gathered := index_workspace_bytes(pair):
        kept = max(kept, described(gathered, "of gathered keys of indexers"))
        scratch = max(scratch, _INDEX_LOGITS_BYTES)
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
        # Compiled before the first run, which allocates the held tensors.
        compiling = compiling_bytes(pair, target, split.tensor) if stage.is_first else 0
        return max(peak + kept, described(compiling, "in compiling"))
    encoding, encoded = _encoder_bytes(pair, split, stage)
    encoding, encoded = described(encoding, "in encoding"), described(encoded, "of encoded images")
    return max(encoding, peak + encoded) + kept


def compiling_bytes(pair: Pair, model: ModelGeometry, tensor: int) -> int:
    """Return the peak of compiling a model at a start without a compile cache; 0 without compilation.

    vLLM sets benchmark_combo_kernel (config/compilation.py, CompilationConfig.__post_init__): torch times the kernels
    that it may join, and fills tensors with random numbers for all that they read and write
    (torch/_inductor/codegen/triton.py, codegen_kernel_benchmark). The first kernel reads the embedding. So a second
    table of that size is in memory with the weights, and with the buffer that flushes the L2 cache between repetitions
    (torch/_inductor/runtime/benchmarking.py). The kernel writes the residual and the normed states. EAGLE-3's
    also reads the target's states, and writes both side by side into a tensor that each repetition clones
    (llama_eagle3.py, forward).
    """
    if not pair.limits.compiles_anew or pair.limits.enforce_eager or not model.layers:
        return 0
    table = ceil_div(padded_vocabulary(model.vocab_size), tensor) * model.hidden_size * model.dtype_bytes
    states = 5 if model.head is not None and model.head.auxiliary_states else 2
    written = states * pair.limits.max_num_batched_tokens * model.hidden_size * model.dtype_bytes
    return table + written + memory_coefficients().l2_bytes


def _draft_pass_bytes(pair: Pair, draft: _Draft | None, split: Parallelism) -> int:
    if draft is None or pair.method not in _METHODS_PROFILED:
        return 0
    return forward_bytes(pair, draft[0], whole_model(draft[0]), draft[1], split)


def unprofiled_latent_bytes(pair: Pair, split: Parallelism) -> int:
    """Return the growth of the workspace after the profiling run for parts of the context, in bytes."""
    reserved = latent_parts_bytes(pair, split.tensor)
    if not reserved or _profiles_latent_parts(pair):
        return 0
    kept, _ = _expert_bytes(pair, loaded_draft(pair), split, stages(pair.target, split.pipeline)[-1])
    return max(0, reserved - kept)


def _proposing_bytes(pair: Pair, draft: ModelGeometry, tensor: int) -> int:
    """Return the peak of joining the target's states, and of proposing or refining.

    A head joins a step's states of several layers side by side, while the states themselves are still held (vLLM,
    combine_hidden_states, called with their torch.cat).
    """
    head = draft.head
    if head is None:
        return proposing_bytes(pair, draft, tensor)
    refines = head.refiner is not None
    proposing = refining_bytes(pair, draft, tensor) if refines else proposing_bytes(pair, draft, tensor)
    if not head.auxiliary_states:
        return proposing
    width = head.auxiliary_states * pair.target.hidden_size * pair.target.dtype_bytes
    return max(pair.limits.max_num_batched_tokens * (width + draft.hidden_size * draft.dtype_bytes), proposing)


def _expert_bytes(pair: Pair, draft: _Draft | None, split: Parallelism, stage: Stage) -> tuple[int, int]:
    """Return the workspace of the experts that stays, and their temporary scratch, in bytes.

    All layers, the draft's too, share one workspace (v1/worker/workspace.py). If the kernel allocates it, only the
    experts' output stays.
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

    Unquantized ones in some versions, not with data parallelism; FP8 with one scale per tensor for weights and inputs
    in all (FlashInferExperts, _supports_quant_scheme). They also run block FP8 with whole experts per rank, whose
    scratch is unknown: it counts as kept.
    """
    if precision is Precision.BF16:
        return pair.era.experts_scratch_in_kernel and split.data == 1
    stored = model.weight_format(precision)
    return precision is Precision.FP8 and stored.scales is Scales.TENSOR and stored.static_inputs


def _encoder_bytes(pair: Pair, split: Parallelism, stage: Stage) -> tuple[int, int]:
    """Return the encoder's peak in the profiling run, and its inputs and outputs, which stay through the text's run.

    It encodes as many of the largest items as fit into a step (vLLM, multimodal/encoder_budget.py); V2 encodes on the
    first stage only.
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
    """Return the number of largest images with which vLLM profiles the encoder (_get_max_items); a video is several."""
    limits, tower = pair.limits, pair.target.tower
    images = max(1, min(tower.longest_item, limits.max_model_len // tower.item_tokens))
    tokens = images * tower.item_tokens
    by_budget = max(limits.max_num_batched_tokens, tokens) // tokens
    by_requests = limits.max_num_seqs * max(1, limits.max_model_len // tokens)
    return images * min(by_budget, by_requests)
