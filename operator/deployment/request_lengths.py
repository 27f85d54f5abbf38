"""Find the requests of a capture's load that are longer than the engines of a deployment allow.

vLLM rejects a prompt that leaves no room for an answer, and lowers ``max_tokens`` to the room that is left
(get_max_tokens in vllm/entrypoints/serve/utils/api_utils.py). Only synthetic prompts have exact lengths in the spec.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from specdecode_operator.api.capture import CaptureWorkload, Pattern, Phase, Source, SyntheticPrompts
from specdecode_operator.deployment.spec_facts import Facts
from specdecode_operator.problems import Problem


def too_long_requests(workload: CaptureWorkload, facts: Facts, where: str) -> list[Problem]:
    """Return the lengths of a load that exceed the maximum of an engine; ``where`` is the path of the workload."""
    prompts = workload.prompts.synthetic
    if prompts is None:
        return []
    limit = _Limit(facts.pair.limits.max_model_len, facts.spec.serving.max_model_len is not None)
    found = [limit.problem(prompts, phase, (where, number)) for number, phase in enumerate(workload.phases)]
    # Phases with the lengths of the workload share a problem.
    return list(dict.fromkeys(each for each in found if each is not None))


def schedule_doubts(facts: Facts) -> Iterator[Problem]:
    """Yield the lengths of scheduled captures that exceed the maximum of the deployment's engines."""
    if facts.replay is not None:
        return
    for schedule in facts.spec.captures:
        if schedule.template.source is Source.LOAD:
            where = f"spec.captures[name={schedule.name}].template.workload"
            yield from too_long_requests(schedule.template.workload, facts, where)


@dataclass(frozen=True)
class _Limit:
    """Maximum length of a prompt with its output, in tokens."""

    longest: int
    is_set: bool  # by serving.maxModelLen, which can be raised; otherwise it is the model's

    def problem(self, prompts: SyntheticPrompts, phase: Phase, place: tuple[str, int]) -> Problem | None:
        """Return the length of a phase to change; ``place`` is the path of the workload and the phase's number."""
        where, number = place
        prompt, answer = phase.prompt_tokens or prompts.prompt_tokens, phase.output_tokens or prompts.output_tokens
        of_phase, of_all = f"{where}.phases[{number}]", f"{where}.prompts.synthetic"
        room = self.longest - prompt
        if room < 1:
            fix = f"use {self.longest - answer} or less" if self.longest > answer else "shorten prompts and outputs"
            message = f"{self._allowed('reject these prompts')}; {fix}{self._or_raise}"
            return Problem(f"{of_phase if phase.prompt_tokens else of_all}.promptTokens", str(prompt), message)
        if answer > room:
            effect = f"end outputs after prompts of {prompt} tokens at {room}"
            message = f"{self._allowed(effect)}; use {room} or less, or shorten the prompts{self._or_raise}"
            return Problem(f"{of_phase if phase.output_tokens else of_all}.outputTokens", str(answer), message)
        # Each turn adds a message without the shared prefix, and its answer.
        shared = prompts.shared_prefix_tokens
        turn = prompt - shared + answer
        turns = min(phase.turns or 1, phase.requests or phase.turns or 1)
        if phase.pattern is not Pattern.MULTITURN or shared + turns * turn <= self.longest:
            return None
        effect = f"do not finish conversations, which grow to {shared + turns * turn} tokens"
        fix = f"use {(self.longest - shared) // turn} turns or fewer, or shorten prompts or outputs"
        return Problem(f"{of_phase}.turns", str(phase.turns), f"{self._allowed(effect)}; {fix}{self._or_raise}")

    def _allowed(self, effect: str) -> str:
        return f"the engines allow {self.longest} tokens for a prompt with its output, so they {effect}"

    @property
    def _or_raise(self) -> str:
        return ", or raise the deployment's serving.maxModelLen" if self.is_set else ""
