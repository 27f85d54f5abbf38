"""Emulate a forward pass without clock and vLLM: draw sampled tokens, also under a grammar."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Final

from .engine_model import Acceptance, Drafting, StepShape

Row = Sequence[int]
"""Words of 32 bits, signed or not: bit b of word w is token 32 w + b."""

_BITS: Final = 32
_CLOSE: Final = 0.5
"""How often a token that closes something is taken where it is allowed."""


@dataclass(frozen=True)
class Constraint:
    """What a grammar allows one request in this step."""

    rows: Sequence[Row]  # for each drafted token, then for the one after them
    acceptable: int  # leading drafted tokens that it allows


@dataclass(frozen=True)
class Endings:
    """Tokens that end what is generated, and those that close a part of it, in the order in which they are tried."""

    stop: Sequence[int] = ()
    closing: Sequence[int] = ()
    blank: Collection[int] = ()  # taken only where nothing else is allowed: grammars of JSON allow any number of them


def allows(row: Row, token: int) -> bool:
    """Decide whether a token is allowed."""
    word = token // _BITS
    return word < len(row) and bool(row[word] >> token % _BITS & 1)


def pick(row: Row, endings: Endings, random: Random) -> int | None:
    """Return an allowed token; None where there is none."""
    for token in endings.stop:
        if allows(row, token):
            return token
    for token in endings.closing:
        if allows(row, token) and random.random() < _CLOSE:
            return token
    return _any(row, endings.blank, random)


def _any(row: Row, blank: Collection[int], random: Random) -> int | None:
    """Return an allowed token, of those from a random word on that has one; one that is blank where no other is."""
    start = random.randrange(len(row)) if row else 0
    last: int | None = None
    for place in (*range(start, len(row)), *range(start)):
        word = row[place]
        tokens = [place * _BITS + bit for bit in range(_BITS) if word >> bit & 1] if word else []
        written: list[int] = [token for token in tokens if token not in blank]
        if written:
            return random.choice(written)
        last = tokens[0] if tokens else last
    return last


NO_DRAFT: Final = 0


@dataclass
class Running:
    """A request that the engine has sent."""

    length: int  # tokens that are known of it
    computed: int  # of which the KV cache holds so many
    temperature: float | None = None
    logprobs: int | None = None  # how many are wanted beside the token's own; None: no logprobs
    stop: Sequence[int] = ()
    drafting: Drafting | None = None  # what becomes of its drafts, from its first to its last
    drafts: list[int] = field(default_factory=list)
    fate: int = 0  # how many of these will be accepted


@dataclass(frozen=True)
class Sampled:
    """What comes of a step, a row for each request."""

    req_ids: list[str]
    tokens: list[list[int]]  # none where only a part of a prompt was computed
    drafts: list[list[int]]  # for the next step
    logprobs: int | None  # the most that any of them wants


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
        """Learn which requests come and go with a step, and return what is in it."""
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
        # A newer vLLM than 0.32 says where no draft can be used, and then makes none.
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
        """Return what comes of a step that was admitted."""
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
        # Model runner V2 gets a request that was preempted as a new one, with what it had generated.
        known = new.prefill_token_ids or new.prompt_token_ids
        length = len(known) if known is not None else new.prompt_len
        before = self._running.get(new.req_id)
        params = new.sampling_params
        temperature = getattr(params, "temperature", None)
        drafting = before.drafting if before is not None else self._drafting(temperature)
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

    def _drafting(self, temperature: float | None) -> Drafting | None:
        if self._acceptance is None:
            return None
        return Drafting(self._acceptance, self._acceptance.draw_class(temperature, self._random), self._random)

    def _resume(self, cached: Any) -> None:
        """Model runner V1 gets requests that were preempted by their ids, with all their tokens."""
        for index, req_id in enumerate(cached.req_ids):
            if req_id in cached.resumed_req_ids:
                running = self._running[req_id]
                running.length = len(cached.all_token_ids[req_id])
                running.computed = cached.num_computed_tokens[index]
                running.drafts, running.fate = [], NO_DRAFT
                if running.drafting is not None:
                    running.drafting.interrupt()

    def _advance(
        self, running: Running, count: int, proposed: Sequence[int], constraint: Constraint | None
    ) -> list[int]:
        if running.computed + count - len(proposed) < running.length:
            running.computed += count
            return []  # a chunk of the prompt
        accepted = min(running.fate, len(proposed))
        # What is scheduled before the drafter has run has placeholders: the drafts are those of the step before.
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
        """Propose tokens, of which it is known already how many will be accepted."""
        running.drafts, running.fate = [], NO_DRAFT
        if not width or running.drafting is None:
            return []
        drafted, running.fate = running.drafting.next(width)
        running.drafts = [self._word() for _ in range(drafted)]
        return list(running.drafts)
