"""Refuses the cases that vLLM itself would not start. What is not certain is sized."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from specdecode_operator.engine.speculative_config import FLY_KEY
from specdecode_operator.estimate.engine_keys import CONTEXT_KEY, MOST_RANKS
from specdecode_operator.estimate.fields import CaseFields
from specdecode_operator.sizing.base.eras import Runner, sizing_facts
from specdecode_operator.sizing.choice.other_models import matching_drafts
from specdecode_operator.sizing.choice.precision_rules import cache_dtype_problem, dtype_problem, served_precision
from specdecode_operator.sizing.families.heads import unregistered_model
from specdecode_operator.sizing.model.geometry import ModelGeometry
from specdecode_operator.sizing.model.layers import SelfAttention
from specdecode_operator.sizing.pair.drafting import vocabulary_mismatch
from specdecode_operator.sizing.pair.pair import Pair, longest_sequence
from specdecode_operator.versions.table import ended_method
from specdecode_operator.vocabulary import ENGINE_DTYPES, Dtype, KvCacheDtype, Method

_KERNEL_BLOCK_TOKENS: Final = 16
"""Blocks of every attention backend on GPUs are multiples of it (v1/attention/backends, MultipleOf)."""

_MOST_VERIFIED_TOKENS: Final = 128
"""V1 verifies at most so many tokens a request (v1/sample/rejection_sampler.py, MAX_SPEC_LEN)."""

REJECTION_KEY: Final = "rejection_sample_method"

_LONGEST: Final = "max_position_embeddings"
_TOLD_LONGEST: Final = "model_max_length"


def refuse_unstartable(fields: CaseFields, speculative: CaseFields | None, pair: Pair, product: str) -> None:
    """Raise CaseError with the first setting of a case that vLLM raises an error for on a GPU product."""
    _refuse_class(fields, speculative, pair)
    _refuse_length(fields, pair)
    _refuse_dtype(fields, pair)
    _refuse_cache_dtype(fields, pair, product)
    _refuse_requests(fields, pair)
    _refuse_blocks(fields, pair.target)
    _refuse_context_ranks(fields, pair.target)
    if speculative is not None:
        _refuse_speculation(speculative, pair)


def _refuse_class(fields: CaseFields, speculative: CaseFields | None, pair: Pair) -> None:
    """model_executor/models/registry.py, _raise_for_unsupported."""
    for where, model in ((fields, pair.target), (speculative, pair.draft)):
        found = None if model is None else unregistered_model(model, pair.limits.engine_version)
        if found is not None and found.refused and where is not None:
            key = "model" if where.section("model_config") is None else "model_config"
            raise where.error(key, f"its class {found.architecture} {found.why}: {found.fix}")


def _refuse_length(fields: CaseFields, pair: Pair) -> None:
    """config/model.py, _get_and_verify_max_len."""
    wanted, longest = fields.values.get("max_model_len"), longest_sequence(pair.target, pair.limits.engine_version)
    if wanted is None or wanted <= longest:
        return
    config = fields.section("model_config")
    if config is not None:
        told = max(_values(config.values, _TOLD_LONGEST), default=0)
        if wanted <= told or not any(_values(config.values, _LONGEST)):
            return
    raise fields.error(
        "max_model_len",
        f"{pair.target.name} was made for at most {longest} tokens: use that or less, or stretch it by hf_overrides",
    )


def _refuse_dtype(fields: CaseFields, pair: Pair) -> None:
    dtype = ENGINE_DTYPES.get(fields.text("dtype") or Dtype.AUTO, Dtype.AUTO)
    for model, precision in ((pair.target, pair.target_precision), (pair.draft, pair.draft_precision)):
        if model is not None and (message := dtype_problem(model, served_precision(model, precision), dtype)):
            raise fields.error("dtype", message)


def _refuse_cache_dtype(fields: CaseFields, pair: Pair, product: str) -> None:
    products = (product,) if product else ()
    wanted = fields.text("kv_cache_dtype") or KvCacheDtype.AUTO
    if message := cache_dtype_problem(pair.target, wanted, pair.limits.engine_version, products):
        raise fields.error("kv_cache_dtype", message)


def _values(config: Mapping[str, Any], key: str) -> Iterator[int]:
    """Yield the numbers under a key, those of the text model's own config too."""
    for name, value in config.items():
        if name == key and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            yield int(value)
        elif isinstance(value, Mapping):
            yield from _values(value, key)


def _refuse_requests(fields: CaseFields, pair: Pair) -> None:
    """config/scheduler.py, verify_max_model_len: vLLM lowers its own default, never what it was told."""
    sequences, tokens = pair.limits.max_num_seqs, pair.limits.max_num_batched_tokens
    told = fields.values.get("max_num_batched_tokens") is not None
    if told and tokens < sequences:
        raise fields.error(
            "max_num_batched_tokens", f"must not be below max_num_seqs, {sequences}: raise it, or lower max_num_seqs"
        )


def _refuse_blocks(fields: CaseFields, target: ModelGeometry) -> None:
    if target.attentions and (fields.values.get("block_size") or 0) % _KERNEL_BLOCK_TOKENS:
        raise fields.error("block_size", f"must be a multiple of {_KERNEL_BLOCK_TOKENS}, as attention on GPUs needs it")


def _refuse_context_ranks(fields: CaseFields, target: ModelGeometry) -> None:
    """config/parallel.py, _validate_parallel_config, and config/model.py, verify_with_parallel_config.

    Ranks of tensor parallelism share sequences: without MLA those that would hold the same KV heads.
    """
    tensor = fields.whole("tp", MOST_RANKS) or 1
    ranks = fields.whole(CONTEXT_KEY, MOST_RANKS) or 1
    if tensor % ranks:
        raise fields.error(CONTEXT_KEY, f"must divide tp, {tensor}: use such a number, or raise tp")
    heads = [mixer for mixer in target.attentions if isinstance(mixer, SelfAttention)]
    if ranks == 1 or not heads or len(heads) < len(target.attentions):
        return
    kv_heads = min(mixer.num_kv_heads for mixer in heads)
    if ranks > tensor // kv_heads:
        most = max(tensor // kv_heads, 1)
        raise fields.error(
            CONTEXT_KEY, f"must be at most tp / KV heads, {tensor} / {kv_heads}: use {most} or less, or raise tp"
        )
    if all((mixer.num_heads // mixer.num_kv_heads) % ranks for mixer in heads):
        shared = heads[0].num_heads // heads[0].num_kv_heads
        raise fields.error(CONTEXT_KEY, f"must divide the {shared} query heads of each KV head: use such a number")


def _refuse_speculation(speculative: CaseFields, pair: Pair) -> None:
    target, draft = pair.target, pair.draft
    if ended := ended_method(pair.method, version := pair.limits.engine_version):
        instead, last = ended
        raise speculative.error(
            "method", f"vLLM {version} has it no more: use {instead}, or vllm_version {last}, the last that has it"
        )
    if pair.era.runner is Runner.V1 and pair.num_speculative_tokens > _MOST_VERIFIED_TOKENS:
        raise speculative.error(
            "num_speculative_tokens", f"vLLM verifies at most {_MOST_VERIFIED_TOKENS} a request: use that or less"
        )
    if pair.checks_by_entropy:
        _refuse_entropy(speculative, pair)
    if draft is None or pair.method != Method.DRAFT_MODEL or pair.maps_vocabulary:
        return
    # config/speculative.py, verify_equal_vocab_size_if_draft_model.
    if reason := vocabulary_mismatch(target, draft):
        other = next(iter(matching_drafts(target, draft)), None)
        remedy = f"choose {other.name}" if other else f"choose a draft with {target.vocab_size}"
        raise speculative.error("model", f"{reason}: {remedy}")


def _refuse_entropy(speculative: CaseFields, pair: Pair) -> None:
    """config/speculative.py, RejectionSampleMethod and _verify_args."""
    version = pair.limits.engine_version
    if FLY_KEY not in sizing_facts(version).get("speculative_keys", {}):
        raise speculative.error(REJECTION_KEY, f"vLLM {version} does not have it: use 0.33 or later")
    if pair.num_speculative_tokens == 1:
        raise speculative.error("num_speculative_tokens", "fly looks at tokens after a rejected one: use 2 or more")
