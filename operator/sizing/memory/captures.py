"""For which batch sizes the engine captures CUDA graphs."""

from functools import lru_cache
from typing import Final

from specdecode_operator.sizing.base.eras import sizing_facts
from specdecode_operator.sizing.base.formula import named
from specdecode_operator.sizing.base.remembered import MOST_REMEMBERED
from specdecode_operator.sizing.base.units import ceil_div
from specdecode_operator.sizing.pair.pair import Pair

_LARGEST_GRAPH: Final = 512
"""Largest batch for which graphs are captured by default (config/vllm.py, _set_cudagraph_sizes)."""

_GPT_OSS: Final = "GptOss"
_LARGEST_GRAPH_OF_GPT_OSS: Final = 1024
"""Default for gpt-oss, whatever max_num_seqs is (model_executor/models/config.py, GptOssForCausalLMConfig)."""


def further_graphs(pair: Pair) -> int:
    """Return the graphs that V2 captures beside those of K: of decoding alone, for each other number of tokens.

    v1/worker/gpu/cudagraph_utils.py, _init_candidates. Each is counted like a size of K's, which has a graph in
    pieces as well: an upper bound. V1 captures in pieces alone then (config/vllm.py,
    _maybe_override_dynamic_sd_cudagraph_mode), so that what is counted for it is one, too.
    """
    if pair.adaptive_verification or not pair.other_draft_lengths:
        return 0  # Graphs of adaptive verification take any mix of tokens.
    sizes = _sizes(_largest_graph(pair))
    return sum(_whole_requests(pair, tokens, sizes) for tokens in pair.other_draft_lengths)


def decode_graphs(pair: Pair) -> int:
    """Return the graphs of decoding alone with K + 1 tokens a request."""
    return _whole_requests(pair, pair.num_speculative_tokens, captured_sizes(pair))


def _whole_requests(pair: Pair, tokens: int, sizes: tuple[int, ...]) -> int:
    """Return to how many batches of whole requests, of a number of proposed tokens, sizes are rounded up."""
    largest, verified = _largest_graph(pair), tokens + 1
    rounded = {ceil_div(size, verified) for size in sizes}
    return sum(each * verified <= largest and each <= pair.limits.max_num_seqs for each in rounded)


def capture_sizes(pair: Pair) -> int:
    """Return for how many batch sizes graphs are captured (config/vllm.py, _set_cudagraph_sizes)."""
    return named(len(_sizes(_largest_graph(pair))), "sizes", like=pair.limits.max_num_seqs)


def _largest_graph(pair: Pair) -> int:
    limits = pair.limits
    own = min(limits.max_num_seqs * (pair.num_speculative_tokens + 1) * 2, _LARGEST_GRAPH)
    if pair.target.architecture.startswith(_GPT_OSS):
        own = _LARGEST_GRAPH_OF_GPT_OSS
    return min(limits.max_graph_tokens or own, limits.max_num_batched_tokens)


@lru_cache(maxsize=MOST_REMEMBERED)
def _sizes(top: int) -> tuple[int, ...]:
    return (*(size for size in (1, 2, 4) if size <= top), *range(8, min(top + 1, 256), 8), *range(256, top + 1, 16))


@lru_cache(maxsize=MOST_REMEMBERED)
def captured_sizes(pair: Pair) -> tuple[int, ...]:
    """Return the sizes in tokens for which graphs are captured, those of whole requests and a full step among them.

    ``capture_sizes`` counts the steps of 8 and 16 alone, as measured estimates do.
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
