"""Buffers that stand before the profiling run: of the sampler, of the drafter and of pipeline stages."""

from typing import Final

from specdecode_operator.sizing.base.eras import Runner, sizing_facts
from specdecode_operator.sizing.base.formula import Named, described, named
from specdecode_operator.sizing.base.units import ceil_div
from specdecode_operator.sizing.families.heads import DFLASH2, draft_class
from specdecode_operator.sizing.memory.adaptive import confidence_state_bytes
from specdecode_operator.sizing.pair.pair import Pair, Parallelism, loaded_draft
from specdecode_operator.sizing.weights.stages import Stage, stages
from specdecode_operator.vocabulary import FLOAT32_BYTES, METHODS_OF_BLOCKS, METHODS_WITH_HIDDEN_STATES, Method

INT32_BYTES: Final = 4
INT64_BYTES: Final = 8

BITS_PER_MASK_WORD: Final = 32
"""Vocabulary entries in one int32 of a bit mask."""

SAMPLER_BYTES_PER_REQUEST: Final = Named(1024 * 12 + 128 * 4 + 1024 * 4 + 129 * 4 + 128 * 4, "of tables")
"""Logit biases, allowed ids, stop ids, bad words and ids to log of one request (vLLM, v1/worker/gpu/sample)."""

NGRAM_PAGE_TOKENS: Final = 256
NGRAM_PAGE_BYTES: Final = 8
"""The token table of ngram keeps a pointer for so many tokens (vLLM, spec_decode/ngram/speculator.py)."""

METHODS_WITH_TOKEN_TABLE: Final = (Method.NGRAM, Method.NGRAM_GPU)

_PIECES: Final = "PIECEWISE"
"""The mode without graphs of whole steps (config/compilation.py, CUDAGraphMode)."""


def state_bytes(pair: Pair, split: Parallelism, stage: Stage | None = None) -> int:
    """Return the buffers that stand before the profiling run, on one pipeline stage; by default the last.

    Hidden states and residual that a stage receives (V1 makes them later),
    embeddings that images are put into (V1 has room for them with any model),
    what each level of an encoder adds to them, and on the last stage the
    buffers of sampler and drafter. Whether they are charged depends on the
    version.
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
            + (_draft_logits_bytes(pair) + confidence_state_bytes(pair) if v2 else 0)
        )
    return size_bytes


def _step_states_bytes(pair: Pair) -> int:
    return pair.limits.max_num_batched_tokens * pair.target.hidden_size * pair.target.dtype_bytes


def charged_state_bytes(pair: Pair, split: Parallelism, stage: Stage) -> int:
    """Return what of these buffers the version takes from the KV cache (utils/mem_utils.py, memory_profiling)."""
    return state_bytes(pair, split, stage) if pair.era.charges_state else _level_bytes(pair)


def _level_bytes(pair: Pair) -> int:
    """Return what is made with the model for further levels of its encoder (qwen3_vl.py, deepstack_input_embeds)."""
    levels = pair.target.tower.output_levels - 1
    return described(levels * _step_states_bytes(pair), "of levels of the encoder") if levels else 0


def _sampler_bytes(pair: Pair) -> int:
    """Return the buffers of V2's sampler (vLLM, v1/worker/gpu/sample, structured_outputs.py and states.py).

    Penalty counts, prompt mask, one grammar mask a proposed token and one
    more, and per-request tables; with ngram also its table of tokens.
    V1 makes its own when they are first needed.
    """
    requests = pair.limits.max_num_seqs
    vocabulary = pair.target.vocab_size
    mask = ceil_div(vocabulary, BITS_PER_MASK_WORD) * INT32_BYTES
    masks = named(1 + (pair.num_speculative_tokens + 1), "masks")
    size_bytes = requests * (vocabulary * INT32_BYTES + masks * mask + SAMPLER_BYTES_PER_REQUEST)
    if pair.method in METHODS_WITH_TOKEN_TABLE:
        length = pair.limits.max_model_len
        tables = requests * (length * INT32_BYTES + ceil_div(length, NGRAM_PAGE_TOKENS) * NGRAM_PAGE_BYTES)
        size_bytes += described(tables, "of token tables")
    return size_bytes


def _draft_logits_bytes(pair: Pair) -> int:
    """Return the logits that a draft which samples keeps until they are checked.

    vLLM, v1/worker/gpu/spec_decode/speculator.py: draft_logits of every
    request, proposed token and vocabulary entry, in the head's type; where
    DSpark has a vocabulary of its own one place more, in which its logits are
    spread over the target's (dspark/speculator.py, _draft_scatter_buf).
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
    """Return the tables from each vocabulary to the other, and what of the draft's both have (vocab_mapping.py)."""
    if pair.draft is None or not pair.maps_vocabulary:
        return 0
    tokens = pair.draft.vocab_size
    return described((tokens + pair.target.vocab_size) * INT64_BYTES + tokens, "of maps between vocabularies")


def _hidden_state_bytes(pair: Pair) -> int:
    """Return the target's hidden states of one step that a head reads (speculator.py).

    Heads that propose a block hold, for their graphs, the states of several
    layers of all requests that are verified (dflash/speculator.py, _aux_staging).
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
    if pair.method not in METHODS_OF_BLOCKS or geometry.head is None or not _stages_states(pair):
        return states
    rows = named(min(limits.max_num_seqs * (pair.num_speculative_tokens + 1), limits.max_num_batched_tokens), "rows")
    staged = rows * geometry.head.auxiliary_states * pair.target.hidden_size * pair.target.dtype_bytes
    return states + described(staged, "of states staged for its graphs")


def _v1_drafter_bytes(pair: Pair) -> int:
    """Return hidden states and embeddings of one step, which V1 holds for a draft of any kind.

    vLLM, v1/spec_decode/llm_base_proposer.py, __init__; the heads of Medusa have a class of their own, without them.
    """
    draft = loaded_draft(pair) if pair.method != Method.MEDUSA else None
    if draft is None:
        return 0
    step = pair.limits.max_num_batched_tokens * draft[0].hidden_size * pair.target.dtype_bytes
    return described(2 * step, "of hidden states and embeddings for the draft")


def _stages_states(pair: Pair) -> bool:
    """Whether the version copies them to a fixed place for graphs of whole drafting steps, and captures such."""
    captured = pair.limits.captures_graphs and pair.limits.graph_mode != _PIECES
    return captured and bool(sizing_facts(pair.limits.engine_version)["stages_auxiliary_states"])
