"""What `advise` prints."""

from specdecode_operator.cli.outputs.base import Output


class PositionOutput(Output):
    """Acceptance at one place in the proposal."""

    position: int
    """From 1."""
    conditional: float
    """Of the drafts whose earlier tokens were all accepted, those whose token here was, too."""
    of_all_drafts: float
    """Of all drafts, those accepted up to here: what vLLM counts."""
    expected_tokens: float
    """Tokens that a request gets from a step where K ends here."""
    known: bool
    """Whether the share was given; where not, that of the position before stands for it."""


class LoadOutput(Output):
    """Whether speculation pays with so many requests at once; times are null where none were given."""

    batch: float
    """Requests in a step with speculation."""
    batch_alone: float
    """Requests in a step without: more than with it where the KV cache is full and the draft takes a share."""
    context_tokens: float
    """Of each request."""
    full_cache: bool
    """Whether these requests are all that the KV cache holds."""
    plain_step_ms: float
    """A step without speculation."""
    step_ms: float
    """A step with K proposed tokens a request."""
    break_even_tokens: float
    """Tokens a request must get from that step for it to be worth its time."""
    break_even_acceptance: float | None
    """Accepted over drafted tokens that give them; null where even all of them are too few."""
    speed_up: float | None
    """Tokens a second over those without speculation; null where acceptance is not known."""
    best_k: int | None
    """The K with the largest speed-up; 0: no speculation."""
    best_speed_up: float | None
    """That speed-up."""


class PrefixCacheOutput(Output):
    """What the draft costs of the prefix cache."""

    method: str
    """How tokens are proposed."""
    engine_version: str
    """vLLM's version."""
    block_tokens: int
    """Tokens in a block of the KV cache."""
    mean_lost_tokens: float
    """Tokens that a prefix of at least a block loses, over all lengths alike."""
    shared_tokens: int | None
    """Tokens with which prompts begin alike; null where it was not asked."""
    found_tokens: int | None
    """Tokens of them that are found in the cache."""
    lost_tokens: int | None
    """Tokens of them that would be found without speculation, and are computed again."""


class AdviseOutput(Output):
    """The arithmetic of speculation for the numbers that were given."""

    num_speculative_tokens: int
    """K."""
    acceptance: list[PositionOutput]
    """By position up to K; empty where it is not known."""
    acceptance_rate: float | None
    """Accepted over drafted tokens at K."""
    expected_tokens: float | None
    """Tokens that a request gets from a step: mean acceptance length, block efficiency."""
    memory_bound_speed_up: float | None
    """MBSU; null without --size-ratio."""
    loads: list[LoadOutput]
    """One for each number of requests and context length; empty where no step times are known."""
    crossover_batch: int | None
    """Requests from which on K no longer pays, at the first context length and while the KV cache has room; 1 where it
    never does, null where it does with 8,192, or it is not known."""
    prefix_cache: PrefixCacheOutput | None
    """The prefix-cache tax; null without a method."""
    assumptions: list[str]
    """What was taken for granted."""
