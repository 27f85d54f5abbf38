"""What a step gives, in vLLM's own classes."""

from collections.abc import Sequence
from itertools import accumulate, islice
from random import Random
from typing import Any

import numpy as np
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

from .batch import Sampled
from .grammar import Constraint


def model_output(sampled: Sampled, text: tuple[int, int], random: Random) -> Any:
    """Return the output of a step."""
    output = ModelRunnerOutput(
        req_ids=sampled.req_ids,
        req_id_to_index={req_id: row for row, req_id in enumerate(sampled.req_ids)},
        sampled_token_ids=sampled.tokens,
    )
    if sampled.logprobs is not None:
        output.logprobs = _logprobs(sampled.tokens, sampled.logprobs, text, random)
    return output


def constraints_of(grammar: Any, scheduled: Any) -> dict[str, Constraint]:
    """Return what a GrammarOutput allows each request that follows a grammar."""
    if grammar is None:
        return {}
    found, row = {}, 0
    told = getattr(grammar, "num_acceptable_drafts", None)  # since 0.32
    for index, req_id in enumerate(grammar.structured_output_request_ids):
        proposed = scheduled.scheduled_spec_decode_tokens.get(req_id, ())
        acceptable = next((at for at, token in enumerate(proposed) if token < 0), len(proposed))
        if told is not None:
            acceptable = min(acceptable, told[index])
        rows = grammar.grammar_bitmask[row : row + len(proposed) + 1].tolist()
        found[req_id] = Constraint(rows, acceptable)
        row += len(proposed) + 1
    return found


def _logprobs(tokens: Sequence[Sequence[int]], wanted: int, text: tuple[int, int], random: Random) -> Any:
    """Return logprobs that look like some: the sampled token is the likeliest, each one after it half as likely."""
    first, last = text
    size = max(last - first + 1, wanted + 2)
    flat = [token for row in tokens for token in row]
    ids = np.empty((len(flat), wanted + 1), dtype=np.int32)
    for row, token in enumerate(flat):
        start = random.randrange(size)
        near = (first + (start + offset) % size for offset in range(wanted + 1))
        ids[row] = [token, *islice((other for other in near if other != token), wanted)]
    falling = np.log(0.5) * (np.arange(wanted + 1, dtype=np.float32) + 1)
    starts = list(accumulate((len(each) for each in tokens), initial=0))
    ranks = np.ones(len(flat), dtype=np.int32)
    return LogprobsLists(ids, np.tile(falling, (len(flat), 1)), ranks, cu_num_generated_tokens=starts)
