"""Buffers allocated before the profiling run, CUDA graph sizes, and memory of adaptive verification.

The buffers belong to the sampler, the drafter and pipeline stages. Adaptive verification follows vLLM,
v1/worker/gpu/spec_decode, adaptive_verification.py and acceptance_estimator.py.
"""

from functools import lru_cache
from typing import Final

from specdecode_operator.enums import FLOAT32_BYTES, METHODS_OF_BLOCKS, METHODS_WITH_HIDDEN_STATES, Method
from specdecode_operator.sizing.arithmetic import Named, ceil_div, described, named
from specdecode_operator.sizing.families.draft_heads import DFLASH2, draft_class
from specdecode_operator.sizing.pair import Pair, Parallelism, loaded_draft
from specdecode_operator.sizing.rank_layers import Stage, stages
from specdecode_operator.sizing.result_cache import MEMO_SIZE
from specdecode_operator.sizing.version_rules import Runner, sizing_facts

_LARGEST_GRAPH: Final = 512
"""Largest batch for which graphs are captured by default (config/vllm.py, _set_cudagraph_sizes)."""

_GPT_OSS: Final = "GptOss"
_LARGEST_GRAPH_OF_GPT_OSS: Final = 1024
"""Default for gpt-oss for any max_num_seqs (model_executor/models/config.py, GptOssForCausalLMConfig)."""


def further_graphs(pair: Pair) -> int:
    """Return the number of V2's decoding graphs for other numbers of proposed tokens than K.

    v1/worker/gpu/cudagraph_utils.py, _init_candidates. Each counts like a size of K, which also has a graph in pieces:
    an upper bound. V1 then captures only pieces (config/vllm.py, _maybe_override_dynamic_sd_cudagraph_mode), so its
    count is an upper bound as well.
    """
    if pair.adaptive_verification or not pair.other_draft_lengths:
        return 0  # Graphs of adaptive verification take any mix of tokens.
    sizes = _sizes(_largest_graph(pair))
    return sum(_whole_requests(pair, tokens, sizes) for tokens in pair.other_draft_lengths)


def decode_graphs(pair: Pair) -> int:
    """Return the number of graphs of decoding with K + 1 tokens per request."""
    return _whole_requests(pair, pair.num_speculative_tokens, captured_sizes(pair))


def _whole_requests(pair: Pair, tokens: int, sizes: tuple[int, ...]) -> int:
    """Return the number of batches of whole requests that sizes are rounded up to with a number of proposed tokens."""
    largest, verified = _largest_graph(pair), tokens + 1
    rounded = {ceil_div(size, verified) for size in sizes}
    return sum(each * verified <= largest and each <= pair.limits.max_num_seqs for each in rounded)


def capture_sizes(pair: Pair) -> int:
    """Return the number of batch sizes with captured graphs (config/vllm.py, _set_cudagraph_sizes)."""
    return named(len(_sizes(_largest_graph(pair))), "sizes", like=pair.limits.max_num_seqs)


def _largest_graph(pair: Pair) -> int:
    limits = pair.limits
    own = min(limits.max_num_seqs * (pair.num_speculative_tokens + 1) * 2, _LARGEST_GRAPH)
    if pair.target.architecture.startswith(_GPT_OSS):
        own = _LARGEST_GRAPH_OF_GPT_OSS
    return min(limits.max_graph_tokens or own, limits.max_num_batched_tokens)


@lru_cache(maxsize=MEMO_SIZE)
def _sizes(top: int) -> tuple[int, ...]:
    return (*(size for size in (1, 2, 4) if size <= top), *range(8, min(top + 1, 256), 8), *range(256, top + 1, 16))


@lru_cache(maxsize=MEMO_SIZE)
def captured_sizes(pair: Pair) -> tuple[int, ...]:
    """Return the sizes in tokens of captured graphs, including whole requests and a full step.

    ``capture_sizes`` counts only the steps of 8 and 16, as measured estimates do.
    """
    limits, largest = pair.limits, _largest_graph(pair)
    if not limits.captures_graphs:
        return ()
    sizes = set(_sizes(largest))
    if limits.max_num_batched_tokens <= largest:
        sizes.add(limits.max_num_batched_tokens)
    if limits.max_graph_tokens is None and sizing_facts(limits.engine_version)["captures_whole_requests"]:
        most = min(limits.max_num_seqs, _LARGEST_GRAPH)
        verified = pair.num_speculative_tokens + 1
        sizes |= {each * verified for each in (*_sizes(most), most) if each * verified <= largest}
    return tuple(sorted(sizes))


_NUMBER_BYTES: Final = 4
"""All tables of adaptive verification hold float32 or int32."""

_TABLES_OF_ESTIMATOR: Final = 2
"""Outcomes and predictions of each proposed token (OnlineAcceptanceEstimator)."""

_TABLES_OF_MANAGER: Final = 3
"""Confidences, and two copies on their way to the host (AdaptiveVerificationManager)."""

_ROWS_OF_MANAGER: Final = 3
"""Per request: tokens that may be verified, other computed tokens, and the offset of its logits."""

_STEPS_OF_A_SIZE: Final = 5
"""Timed steps per size (_PROFILE_REPLAYS)."""

_STEP_OF_MEMORY_S: Final = 0.1
"""Time in which any GPU reads its whole memory: 24 GB at 0.3 TB/s, 80 at 3.3. No step of decoding reads more."""

_WEIGHTS_BYTES_PER_S: Final = 50e12
"""Bytes of 16-bit weights that a GPU multiplies with a token in a second: two operations each, at 50 TFLOP/s."""


def confidence_tables_bytes(pair: Pair) -> int:
    """Return the bytes of the tables that select verified tokens, allocated after the KV cache, out of the slack."""
    if not pair.adaptive_verification:
        return 0
    rows = _ROWS_OF_MANAGER * pair.limits.max_num_seqs + 1
    return _TABLES_OF_MANAGER * _confidences(pair) + rows * _NUMBER_BYTES


def _confidences(pair: Pair) -> int:
    return pair.limits.max_num_seqs * pair.num_speculative_tokens * _NUMBER_BYTES


def adaptive_graphs(pair: Pair) -> int:
    """Return how many more graphs are captured than with a fixed K.

    A fixed K has one for each multiple of K + 1 that a size is rounded up to, adaptive verification one for each size
    (v1/worker/gpu/cudagraph_utils.py, _init_candidates).
    """
    if not pair.adaptive_verification:
        return 0
    most = pair.limits.max_num_seqs * (pair.num_speculative_tokens + 1)
    return max(0, sum(size <= most for size in captured_sizes(pair)) - decode_graphs(pair))


def profiled_steps(pair: Pair) -> tuple[int, ...]:
    """Return the tokens of each step that the engine times before it serves: captured sizes and larger.

    Beyond the largest captured: half as many again, and doubled up to a full step (batches_to_profile).
    """
    if not pair.adaptive_verification:
        return ()
    sizes, most = captured_sizes(pair), pair.limits.max_num_batched_tokens
    if not sizes:
        return ()
    larger = {min(sizes[-1] * 3 // 2, most)}
    size = sizes[-1]
    while size < most:
        size = min(size * 2, most)
        larger.add(size)
    return tuple(each for each in (*sizes, *sorted(larger - set(sizes))) for _ in range(_STEPS_OF_A_SIZE))


def cost_profile_s(pair: Pair, weights_bytes: int) -> int:
    """Return the most seconds by which profiling these steps extends the start; 0 without adaptive verification.

    ``weights_bytes`` apply to one GPU. The result is an upper bound for deadlines: each step may read all memory
    once, and every token is computed at a fraction of the rate in data sheets.
    """
    steps = profiled_steps(pair)
    computing_s = sum(steps) * weights_bytes / _WEIGHTS_BYTES_PER_S
    return ceil_div(round(10 * (len(steps) * _STEP_OF_MEMORY_S + computing_s)), 10)


_INT32_BYTES: Final = 4
_INT64_BYTES: Final = 8

_BITS_PER_MASK_WORD: Final = 32
"""Vocabulary entries in one int32 of a bit mask."""

_SAMPLER_BYTES_PER_REQUEST: Final = Named(1024 * 12 + 128 * 4 + 1024 * 4 + 129 * 4 + 128 * 4, "of tables")
"""Logit biases, allowed ids, stop ids, bad words and ids to log of one request (vLLM, v1/worker/gpu/sample)."""

_NGRAM_PAGE_TOKENS: Final = 256
_NGRAM_PAGE_BYTES: Final = 8
"""The token table of ngram keeps a pointer per page of tokens (vLLM, spec_decode/ngram/speculator.py)."""

METHODS_WITH_TOKEN_TABLE: Final = (Method.NGRAM, Method.NGRAM_GPU)


def state_bytes(pair: Pair, split: Parallelism, stage: Stage | None = None) -> int:
    """Return the bytes of buffers that exist before the profiling run, on one pipeline stage; by default the last.

    Hidden states and residual that a stage receives (V1 makes them later), embeddings that images are put into (V1 has
    room for them with any model), the addition of each level of an encoder, and on the last stage the buffers of
    sampler and drafter. Whether they are charged depends on the version.
    """
    if stage is None:
        stage = stages(pair.target, split.pipeline)[-1]
    target, v2 = pair.target, pair.era.runner is Runner.V2
    size_bytes = _sampler_bytes(pair) if stage.is_last and v2 else 0
    size_bytes += _level_bytes(pair)
    if not stage.is_first and v2:
        size_bytes += described(2 * _step_states_bytes(pair), "of states from the stage before")
    if not v2 or (target.tower.item_tokens and stage.is_first):
        size_bytes += described(_step_states_bytes(pair), "of embeddings")
    if stage.is_last:
        size_bytes += (
            _vocabulary_map_bytes(pair)
            + (_hidden_state_bytes(pair) if v2 else _v1_drafter_bytes(pair))
            + (_draft_logits_bytes(pair) if v2 else 0)
        )
    if stage.is_last and v2 and pair.adaptive_verification:
        # Made with the draft. A DSpark head that predicts acceptance itself needs none: a few KiB too much.
        tables = named(_TABLES_OF_ESTIMATOR, "tables", like=pair.num_speculative_tokens)
        size_bytes += described(tables * _confidences(pair), "of an estimate of acceptance")
    return size_bytes


def _step_states_bytes(pair: Pair) -> int:
    return pair.limits.max_num_batched_tokens * pair.target.hidden_size * pair.target.dtype_bytes


def charged_state_bytes(pair: Pair, split: Parallelism, stage: Stage) -> int:
    """Return the part of the buffers that the version charges to the budget (utils/mem_utils.py, memory_profiling)."""
    return state_bytes(pair, split, stage) if pair.era.charges_state else _level_bytes(pair)


def _level_bytes(pair: Pair) -> int:
    """Return the buffers for further levels of the encoder (qwen3_vl.py, deepstack_input_embeds)."""
    levels = pair.target.tower.output_levels - 1
    return described(levels * _step_states_bytes(pair), "of levels of the encoder") if levels else 0


def _sampler_bytes(pair: Pair) -> int:
    """Return the buffers of V2's sampler (vLLM, v1/worker/gpu/sample, structured_outputs.py and states.py).

    Penalty counts, prompt mask, one grammar mask per proposed token and one more, and per-request tables; with ngram
    also its table of tokens. V1 allocates its own on first use.
    """
    requests = pair.limits.max_num_seqs
    vocabulary = pair.target.vocab_size
    mask = ceil_div(vocabulary, _BITS_PER_MASK_WORD) * _INT32_BYTES
    masks = named(1 + (pair.num_speculative_tokens + 1), "masks")
    size_bytes = requests * (vocabulary * _INT32_BYTES + masks * mask + _SAMPLER_BYTES_PER_REQUEST)
    if pair.method in METHODS_WITH_TOKEN_TABLE:
        length = pair.limits.max_model_len
        tables = requests * (length * _INT32_BYTES + ceil_div(length, _NGRAM_PAGE_TOKENS) * _NGRAM_PAGE_BYTES)
        size_bytes += described(tables, "of token tables")
    return size_bytes


def _draft_logits_bytes(pair: Pair) -> int:
    """Return the logits that a sampling draft keeps until they are verified.

    vLLM, v1/worker/gpu/spec_decode/speculator.py: draft_logits of every request, proposed token and vocabulary entry,
    in the head's type; one place more if DSpark has its own vocabulary, in which its logits are spread over the
    target's (dspark/speculator.py, _draft_scatter_buf).
    """
    draft = loaded_draft(pair) if pair.samples_drafts else None
    if draft is None:
        return 0
    requests, places = pair.limits.max_num_seqs, pair.num_speculative_tokens
    head = draft[0].head
    if pair.method == Method.DSPARK and head is not None and head.output_rows != draft[0].vocab_size:
        places += 1
    # DFlash 2 checks by what its selector chose from, in 32 bits (dflash2/speculator.py, draft_logits_spec).
    width = FLOAT32_BYTES if draft_class(draft[0]) == DFLASH2 else pair.target.dtype_bytes
    return described(requests * places * draft[0].vocab_size * width, "of draft logits")


def _vocabulary_map_bytes(pair: Pair) -> int:
    """Return the tables from each vocabulary to the other, and the mask of common tokens (vocab_mapping.py)."""
    if pair.draft is None or not pair.maps_vocabulary:
        return 0
    tokens = pair.draft.vocab_size
    return described((tokens + pair.target.vocab_size) * _INT64_BYTES + tokens, "of maps between vocabularies")


def _hidden_state_bytes(pair: Pair) -> int:
    """Return the target's hidden states of one step that a head reads (speculator.py).

    If the version captures graphs of whole drafting steps, heads that propose a block also hold, at a fixed place, the
    states of several layers of all verified requests (dflash/speculator.py, _aux_staging).
    """
    draft = loaded_draft(pair) if pair.method in METHODS_WITH_HIDDEN_STATES else None
    if draft is None:
        return 0
    geometry, _ = draft
    limits = pair.limits
    # Of a Gemma 4 assistant they are as wide as the target's (Gemma4MTPModelArchConfigConvertor.get_hidden_size).
    width = (geometry.head.returns_width if geometry.head else None) or geometry.hidden_size
    states = described(limits.max_num_batched_tokens * width * geometry.dtype_bytes, "of hidden states for the draft")
    if geometry.head is not None and geometry.head.embeds_images:
        # vLLM, target_dependent_ar/speculator.py, load_model.
        states += described(_step_states_bytes(pair), "of embeddings for the draft")
    captured = limits.captures_graphs and limits.graph_mode != "PIECEWISE"
    stages_states = captured and sizing_facts(limits.engine_version)["stages_auxiliary_states"]
    if pair.method not in METHODS_OF_BLOCKS or geometry.head is None or not stages_states:
        return states
    rows = named(min(limits.max_num_seqs * (pair.num_speculative_tokens + 1), limits.max_num_batched_tokens), "rows")
    staged = rows * geometry.head.auxiliary_states * pair.target.hidden_size * pair.target.dtype_bytes
    return states + described(staged, "of states staged for its graphs")


def _v1_drafter_bytes(pair: Pair) -> int:
    """Return hidden states and embeddings of one step, which V1 holds for any draft but Medusa's heads.

    vLLM, v1/spec_decode/llm_base_proposer.py, __init__.
    """
    draft = loaded_draft(pair) if pair.method != Method.MEDUSA else None
    if draft is None:
        return 0
    step = pair.limits.max_num_batched_tokens * draft[0].hidden_size * pair.target.dtype_bytes
    return described(2 * step, "of hidden states and embeddings for the draft")
