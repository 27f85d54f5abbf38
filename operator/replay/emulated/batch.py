"""Emulate forward passes without clock and vLLM: draw sampled tokens, also under a grammar, and count late steps."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Final

from .engine_model import Acceptance, Drafting, StepShape

Row = Sequence[int]
"""Words of 32 bits, signed or not: bit b of word w is token 32 w + b."""

_BITS: Final = 32
_CLOSE: Final = 0.5  # chance to take an allowed token that closes a part


@dataclass(frozen=True)
class Constraint:
    """Tokens that a grammar allows one request in this step."""

    rows: Sequence[Row]  # for each drafted token, then for the one after them
    acceptable: int  # leading drafted tokens that it allows


@dataclass(frozen=True)
class Endings:
    """Tokens that end a text, and tokens that close a part of it such as a string, in order of preference."""

    stop: Sequence[int] = ()
    closing: Sequence[int] = ()
    blank: Collection[int] = ()  # a last resort: grammars of JSON allow any number of them


def allows(row: Row, token: int) -> bool:
    """Return whether a token is allowed."""
    word = token // _BITS
    return word < len(row) and bool(row[word] >> token % _BITS & 1)


def pick(row: Row, endings: Endings, random: Random) -> int | None:
    """Return an allowed token, a blank one only if no other is allowed; None if no token is allowed."""
    for token in endings.stop:
        if allows(row, token):
            return token
    for token in endings.closing:
        if allows(row, token) and random.random() < _CLOSE:
            return token
    # Start at a random word.
    start = random.randrange(len(row)) if row else 0
    last: int | None = None
    for place in (*range(start, len(row)), *range(start)):
        word = row[place]
        tokens = [place * _BITS + bit for bit in range(_BITS) if word >> bit & 1] if word else []
        written: list[int] = [token for token in tokens if token not in endings.blank]
        if written:
            return random.choice(written)
        last = tokens[0] if tokens else last
    return last


@dataclass
class Running:
    """A request of the engine."""

    length: int  # known tokens
    computed: int  # tokens in the KV cache
    temperature: float | None = None
    logprobs: int | None = None  # number of top logprobs besides the token's own; None for no logprobs
    stop: Sequence[int] = ()
    drafting: Drafting | None = None
    drafts: list[int] = field(default_factory=list)
    fate: int = 0  # number of drafts that will be accepted


@dataclass(frozen=True)
class Sampled:
    """Output of a step, a row for each request."""

    req_ids: list[str]
    tokens: list[list[int]]  # empty if only a part of a prompt was computed
    drafts: list[list[int]]  # for the next step
    logprobs: int | None  # the largest requested number


class Batch:
    """The state that a model runner keeps between steps, without tensors.

    ``scheduled`` is vLLM's SchedulerOutput.
    """

    def __init__(self, acceptance: Acceptance | None, text: tuple[int, int], endings: Endings, random: Random) -> None:
        self._acceptance = acceptance
        self._text = text
        self._endings = endings
        self._random = random
        self._running: dict[str, Running] = {}

    def admit(self, scheduled: Any) -> StepShape:
        """Update the running requests for a step that vLLM scheduled, and return the size of the step."""
        for req_id in scheduled.finished_req_ids:
            self._running.pop(req_id, None)
        for new in scheduled.scheduled_new_reqs:
            self._begin(new)
        self._resume(scheduled.scheduled_cached_reqs)
        prefill = pairs = context = 0
        samples = False
        for req_id, count in scheduled.num_scheduled_tokens.items():
            running = self._running[req_id]
            attended = running.computed + count
            context += attended
            proposed = len(scheduled.scheduled_spec_decode_tokens.get(req_id, ()))
            samples = samples or attended - proposed >= running.length
            if count - proposed > 1 or attended - proposed < running.length:
                prefill += count
                pairs += count * attended
        # From 0.33 on, vLLM sets skip_drafts if the next step cannot use drafts, and does not run the drafter.
        drafts = samples and not getattr(scheduled, "skip_drafts", False)
        return StepShape(
            requests=len(scheduled.num_scheduled_tokens),
            scheduled_tokens=scheduled.total_num_scheduled_tokens,
            prefill_tokens=prefill,
            context_tokens=context,
            prefill_pairs=pairs,
            drafted=scheduled.num_spec_tokens_to_schedule if drafts else 0,
        )

    def sample(self, scheduled: Any, constraints: Mapping[str, Constraint]) -> Sampled:
        """Return the output of an admitted step."""
        req_ids = list(scheduled.num_scheduled_tokens)
        width = scheduled.num_spec_tokens_to_schedule
        tokens, drafts = [], []
        wanted = None
        for req_id in req_ids:
            running = self._running[req_id]
            proposed = scheduled.scheduled_spec_decode_tokens.get(req_id, ())
            count = scheduled.num_scheduled_tokens[req_id]
            tokens.append(self._advance(running, count, proposed, constraints.get(req_id)))
            drafts.append(self._draft(running, width) if tokens[-1] else [])
            if running.logprobs is not None:
                wanted = max(wanted or 0, running.logprobs)
        return Sampled(req_ids, tokens, drafts, wanted)

    def _begin(self, new: Any) -> None:
        # Model runner V2 gets a preempted request as a new one, with its generated tokens.
        known = new.prefill_token_ids or new.prompt_token_ids
        length = len(known) if known is not None else new.prompt_len
        before = self._running.get(new.req_id)
        params = new.sampling_params
        temperature = getattr(params, "temperature", None)
        drafting, acceptance = before.drafting if before is not None else None, self._acceptance
        if before is None and acceptance is not None:
            drafting = Drafting(acceptance, acceptance.draw_class(temperature, self._random), self._random)
        self._running[new.req_id] = Running(
            length,
            new.num_computed_tokens,
            temperature,
            getattr(params, "num_logprobs", None),
            sorted(getattr(params, "all_stop_token_ids", None) or ()),
            drafting,
        )
        if drafting is not None:
            drafting.interrupt()

    def _resume(self, cached: Any) -> None:
        """Resume preempted requests, which model runner V1 gets by their ids with all their tokens."""
        for index, req_id in enumerate(cached.req_ids):
            if req_id in cached.resumed_req_ids:
                running = self._running[req_id]
                running.length = len(cached.all_token_ids[req_id])
                running.computed = cached.num_computed_tokens[index]
                running.drafts, running.fate = [], 0
                if running.drafting is not None:
                    running.drafting.interrupt()

    def _advance(
        self, running: Running, count: int, proposed: Sequence[int], constraint: Constraint | None
    ) -> list[int]:
        if running.computed + count - len(proposed) < running.length:
            running.computed += count
            return []  # a chunk of the prompt
        accepted = min(running.fate, len(proposed))
        # Steps that are scheduled before the drafter has run have placeholders for the drafts of the step before.
        drafts = running.drafts if any(token < 0 for token in proposed) and constraint is None else list(proposed)
        if constraint is not None:
            accepted = min(accepted, constraint.acceptable)
        running.computed += count - (len(proposed) - accepted)
        running.length += accepted + 1
        return [*drafts[:accepted], self._token(running, accepted, constraint)]

    def _token(self, running: Running, position: int, constraint: Constraint | None) -> int:
        if constraint is not None and position < len(constraint.rows):
            endings = replace(self._endings, stop=running.stop)
            allowed = pick(constraint.rows[position], endings, self._random)
            if allowed is not None:
                return allowed
        return self._word()

    def _word(self) -> int:
        # Faster than randint: 64 requests with K 5 take 400 of them a step.
        first, last = self._text
        return first + int(self._random.random() * (last - first + 1))

    def _draft(self, running: Running, width: int) -> list[int]:
        """Propose tokens, and decide how many of them will be accepted."""
        running.drafts, running.fate = [], 0
        if not width or running.drafting is None:
            return []
        drafted, running.fate = running.drafting.next(width)
        running.drafts = [self._word() for _ in range(drafted)]
        return list(running.drafts)


LATE_SHARE_OF_STEP: Final = 0.1
LATE_AT_LEAST_S: Final = 0.001
"""A step is late if its tokens came later by more than a tenth of it, and by more than a millisecond."""

BELIEVABLE_SHARE: Final = 0.05
"""Share of late steps up to which results are valid. Beyond it, medians may still be right, but tails are not."""

_ENOUGH_STEPS: Final = 200


@dataclass
class Lateness:
    """Counts steps, and how late they were."""

    steps: int = 0
    late_steps: int = 0
    late_s: float = 0.0
    modelled_s: float = 0.0

    def add(self, step_s: float, late_s: float) -> None:
        """Count a step by its modelled duration and the delay of its tokens."""
        self.steps += 1
        self.modelled_s += step_s
        self.late_s += max(0.0, late_s)
        self.late_steps += late_s > max(LATE_AT_LEAST_S, LATE_SHARE_OF_STEP * step_s)

    @property
    def share(self) -> float:
        """The share of steps that were late."""
        return self.late_steps / self.steps if self.steps else 0.0

    @property
    def is_believable(self) -> bool:
        """Whether the share of late steps is small enough."""
        return self.share <= BELIEVABLE_SHARE

    @property
    def is_hopeless(self) -> bool:
        """Whether to warn during the run."""
        return self.steps >= _ENOUGH_STEPS and not self.is_believable

    def verdict(self) -> str:
        """Return the verdict in one line."""
        if not self.steps:
            return "emulated: no step was run"
        longer = 100 * self.late_s / self.modelled_s if self.modelled_s else 0.0
        said = f"emulated: {self.steps} steps, {100 * self.share:.1f} % of them late, {longer:.1f} % longer in all"
        if self.is_believable:
            return said
        return (
            f"{said}: this machine was too slow for reliable results (at most {100 * BELIEVABLE_SHARE:.0f} % may be"
            " late): stop other work, or emulate fewer requests"
        )
