"""What a forward pass would have known of each request, and what it would have returned; without clock and vLLM."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Final

from .acceptance import Acceptance, Drafting
from .grammar import Constraint, Endings, pick
from .step_time import StepShape

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
