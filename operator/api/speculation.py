"""How the engine of a SpecDecodeDeployment speculates: who proposes tokens, how many, and how they are checked."""

from typing import Annotated, Any

from pydantic import Field, StrictBool, StrictInt

from specdecode_operator.api.base import ApiModel
from specdecode_operator.api.models import Draft
from specdecode_operator.api.open_objects import BOUNDED
from specdecode_operator.api.values import DraftHeadQuantization, DraftSampling, Loss, RejectionSampling
from specdecode_operator.vocabulary import Method


class Ngram(ApiModel):
    """Bounds of the prompt lookup that methods ngram and ngram_gpu do."""

    prompt_lookup_min: StrictInt | None = Field(default=None, ge=1, le=64)
    """Shortest n-gram looked up, in tokens."""

    prompt_lookup_max: StrictInt | None = Field(default=None, ge=1, le=64)
    """Longest n-gram looked up, in tokens."""


class Suffix(ApiModel):
    """How method suffix looks proposals up in earlier answers."""

    max_tree_depth: StrictInt | None = Field(default=None, ge=1, le=1024)
    """Longest sequence that its trees hold, in tokens. Absent: the engine's 24."""

    max_cached_requests: StrictInt | None = Field(default=None, ge=0, le=10_000_000)
    """Earlier answers that are kept; 0 keeps none. Absent: the engine's 10,000."""

    max_spec_factor_percent: StrictInt | None = Field(default=None, ge=0, le=10_000)
    """Tokens proposed for each that matched, in percent. Absent: the engine's 100."""

    min_token_probability_percent: StrictInt | None = Field(default=None, ge=0, le=100)
    """How often a token must have followed to be proposed, in percent. Absent: the engine's 10."""


class BatchSizeRange(ApiModel):
    """K for one range of running requests."""

    from_: StrictInt = Field(alias="from", ge=1, le=65_536)
    """First number of running requests, inclusive."""

    to: StrictInt = Field(ge=1, le=65_536)
    """Last number of running requests, inclusive."""

    num_speculative_tokens: StrictInt = Field(ge=0, le=32)
    """K in this range; 0 turns speculation off."""


class Speculation(ApiModel):
    """How the engine speculates."""

    method: Method
    """What proposes tokens: a draft model (draft_model); a head trained for the target (eagle, eagle3, dflash, dspark,
    and medusa up to vLLM 0.32); layers of the target's own checkpoint (mtp); a lookup in the prompt (ngram, ngram_gpu)
    or in earlier answers (suffix). With none, the engine does not speculate."""

    num_speculative_tokens: StrictInt | None = Field(default=None, ge=0, le=64)
    """Number of tokens proposed per step (vLLM's num_speculative_tokens, often called K). For suffix it is the maximum,
    and at most 64; for other methods at most 32. Required unless method is none."""

    num_speculative_tokens_by_batch_size: list[BatchSizeRange] = Field(default=[], max_length=256)
    """K by the number of running requests, from 1 up. Where no range applies, numSpeculativeTokens holds."""

    draft: Draft | None = None
    """Draft model or head, for the methods draft_model, eagle, eagle3, dflash, dspark and medusa. Method mtp takes one
    that holds layers for multi-token prediction, such as an assistant of Gemma 4, and drafts with the target's own
    layers without one. Method dspark without one drafts with stages inside the target's checkpoint (DeepSeek V4)."""

    use_heterogeneous_vocab: StrictBool = False
    """Whether the draft may have another vocabulary than the target, for method draft_model: the engine maps the tokens
    that both have, and the draft proposes no others. Then the engine's older model runner serves both, and the draft
    proposes the likeliest tokens."""

    ngram: Ngram | None = None
    """Lookup bounds, for methods ngram and ngram_gpu."""

    suffix: Suffix | None = None
    """Lookup bounds, for method suffix."""

    rejection_sampling: RejectionSampling | None = None
    """How drafted tokens are checked. The target's distribution is kept: one after another (standard), or all of a step
    together (block), by which more of them pass. It is not kept: tokens pass that the target would have rejected, where
    it was unsure itself and would accept the next ones (fly, of vLLM 0.33 on GPUs; needs lossy). Absent: the engine's,
    standard."""

    lossy: Loss | None = None
    """Whether answers may be others than the target's own, which rejectionSampling fly makes them: only what is
    Accepted here is served so. Absent: they may not."""

    draft_sampling: DraftSampling | None = None
    """How a draft picks its tokens: the likeliest ones (greedy), or by chance as the target does (probabilistic), by
    which more of them pass where requests have a temperature; its logits then take memory. Absent: the engine's,
    greedy."""

    adaptive_verification: StrictBool | None = None
    """Whether each step verifies only as many of the drafted tokens as pay, by costs that the engine measures while it
    starts (true), or all of them (false). Those left out count as drafted and not accepted: acceptance reads low, mean
    acceptance length stays true. Absent: the engine's, false."""

    draft_lm_head_quantization: DraftHeadQuantization | None = None
    """Precision of the draft's own copy of the target's output head, for methods eagle and mtp: reading it takes less
    time, and the copy takes memory. What the target answers stays the same. Absent: both use one head."""

    xpress_top_c: StrictInt | None = Field(default=None, ge=0, le=1_048_576)
    """From how many of the likeliest tokens the refiner of an XPress head chooses at each place, for method dflash; 0
    for all, which takes much memory. Absent: as many as its config.json says, or 512."""

    extra_config: Annotated[dict[str, Any], Field(max_length=32), BOUNDED] | None = None
    """Further keys of vLLM's --speculative-config, by vLLM's names, for what has no field: attention_backend,
    moe_backend, kv_cache_dtype, enforce_eager, draft_load_config, disable_padded_drafter_batch and others. Keys that a
    field decides, and keys that this vLLM version lacks, are refused. The plan does not count what they change."""
