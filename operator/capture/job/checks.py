"""Whether arms answer alike: what each is asked once, when its load is over and nothing is recorded any more."""

import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec

from specdecode_operator.capture.files.checks import MOST_TOKENS, Checks, GreedyAnswer, GreedyCheck, ParsingCheck
from specdecode_operator.capture.job.check_requests import CheckRequests, NotAnsweredError
from specdecode_operator.capture.load.client import server_of
from specdecode_operator.capture.load.prompts.sources import PromptSource
from specdecode_operator.capture.load.workload import CheckSettings, RunSettings
from specdecode_operator.redaction import clip

BUDGET_S: Final = 180.0
"""How long each check may take; what was asked until then counts."""

_NONE_ASKED: Final = "spec.checks asks for none"
_NO_TIME: Final = "there was no time for any"
_SHOWN_FAILURES: Final = 5
_LONGEST_REASON: Final = 500
_QUESTION: Final = "Is {} an even number? Answer through the function."
"""For a workload of random token ids, which no chat template takes."""

_Subject = TypeVar("_Subject")


async def check_answers(
    settings: RunSettings, wanted: CheckSettings, source: PromptSource, budget_s: float = BUDGET_S
) -> Checks:
    """Ask an engine what all arms are asked; what it does not answer is told, and no error."""
    greedy = _asked(settings, source, wanted.greedy_prompts)
    prompts = [each.prompt for each in _asked(settings, source, wanted.structured_requests)]
    questions = [
        prompt if isinstance(prompt, str) else _QUESTION.format(number) for number, prompt in enumerate(prompts)
    ]
    async with CheckRequests(server_of(settings.engine), settings.workload.timeout_seconds) as requests:
        return Checks(
            greedy=await _greedy(requests, greedy, budget_s),
            structured=await _parsing(requests.structured, prompts, budget_s),
            tool_calls=await _parsing(requests.tool_call, questions, budget_s),
        )


@dataclass(frozen=True)
class _Asked:
    prompt: Sequence[int] | str
    most_tokens: int
    sha256: str


def _asked(settings: RunSettings, source: PromptSource, count: int) -> list[_Asked]:
    """Return prompts of the workload, by turns of its phases."""
    phases = [phase.name for phase in settings.workload.phases]
    found = []
    for number in range(count):
        phase, index = phases[number % len(phases)], number // len(phases)
        prompt = source.first(phase, index).content
        sha256 = hashlib.sha256(msgspec.json.encode(prompt)).hexdigest()
        found.append(_Asked(prompt, min(source.output_tokens(phase, index), MOST_TOKENS), sha256))
    return found


async def _greedy(requests: CheckRequests, asked: Sequence[_Asked], budget_s: float) -> GreedyCheck:
    answers: list[GreedyAnswer] = []
    refused = _NONE_ASKED
    until_s = time.monotonic() + budget_s
    for each in asked:
        if time.monotonic() >= until_s:
            refused = _NO_TIME
            break
        try:
            answers.append(await requests.greedy(each.prompt, each.sha256, each.most_tokens))
        except NotAnsweredError as error:
            if not error.refused:
                return GreedyCheck(not_measured=clip(str(error), _LONGEST_REASON))
            # Every arm refuses it: the prompt is longer than the engine takes, say.
            refused = clip(str(error), _LONGEST_REASON)
    return GreedyCheck(answers=answers, not_measured=None if answers else refused)


async def _parsing(
    ask: Callable[[_Subject, str], Awaitable[str | None]], asked: Sequence[_Subject], budget_s: float
) -> ParsingCheck:
    failures: list[str] = []
    number = 0
    until_s = time.monotonic() + budget_s
    for subject in asked:
        if time.monotonic() >= until_s:
            break
        try:
            wrong = await ask(subject, str(number))
        except NotAnsweredError as error:
            if error.refused and number == len(failures):
                # It would refuse all of them: a tokenizer without a chat template, say.
                return ParsingCheck(not_measured=clip(str(error), _LONGEST_REASON))
            wrong = clip(str(error), _LONGEST_REASON)
        number += 1
        failures += [wrong] if wrong is not None else []
    return ParsingCheck(
        asked=number,
        parsed=number - len(failures),
        failures=failures[:_SHOWN_FAILURES],
        not_measured=None if number else _NO_TIME if asked else _NONE_ASKED,
    )
