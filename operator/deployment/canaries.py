"""Configure the canary prompts that the sidecar of each engine asks, and state what they cost.

The sidecar reads them from `canaries.json` in the ConfigMap with the plan, so that a change restarts no engine.
"""

import json
from dataclasses import dataclass
from typing import Final

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import Canaries
from specdecode_operator.deployment.engine_settings import served_names
from specdecode_operator.deployment.spec_facts import Facts
from specdecode_operator.enums import Precision

DEFAULT_PROMPTS: Final = (
    "The capital of France is Paris. The capital of Japan is Tokyo. The capital of Italy is",
    'def fibonacci(n: int) -> int:\n    """Return the n-th Fibonacci number."""\n    if n < 2:\n        return n\n    ',
    '[{"name": "Ada", "born": 1815, "field": "mathematics"}, {"name": "Marie", "born": 1867, "field":',
    "Q: What is 17 + 25?\nA: 17 + 25 = 42.\nQ: What is 38 + 47?\nA: 38 + 47 =",
    "Il était une fois, dans un petit village au bord de la mer, une jeune fille qui",
)
"""Prompts that models continue with high confidence, so that few positions are near a tie."""

CLOSE_NATS: Final = 0.25
"""Difference of log probability up to which two tokens are equally likely: logits from 16 to 32 have steps of 0.125 in
BF16, and either may be off by one step, as the order of sums depends on the batch."""
COARSE_NATS: Final = 1.0
"""The same of targets with experts or with less than 16 bits: a small difference sends a token to another expert, or
rounds an activation or a cached key otherwise. It is a judgement and has not been measured."""

_BITS_16: Final = 2.0  # bytes of an element of the KV cache


def margin_nats(facts: Facts) -> float:
    """Return by how much less likely than the best token a right one may be in a prefill."""
    pair = facts.pair
    is_coarse = (
        pair.target.has_experts
        or pair.target_precision not in (None, Precision.BF16)
        or (pair.limits.kv_cache_element_bytes or _BITS_16) < _BITS_16
    )
    return COARSE_NATS if is_coarse else CLOSE_NATS


def not_asked(facts: Facts) -> str | None:
    """Return why the engines of a spec with canaries are not asked, or None."""
    if facts.replay is not None:
        return "spec.engine.replay runs no model"
    if facts.spec.speculation is not None and facts.spec.speculation.lossy:
        return "spec.speculation.lossy allows answers that differ from the target's"
    return None


def canaries_json(facts: Facts) -> str | None:
    """Return the content of canaries.json; None without canaries."""
    if asked_canaries(facts) is None:
        return None
    return json.dumps(questions(facts), ensure_ascii=False, indent=1) + "\n"


def questions(facts: Facts) -> Body:
    """Return the canary prompts and how to judge the answers, with the defaults if the spec has no canaries."""
    canaries = canaries_of(facts) or Canaries()
    return {
        "prompts": list(prompts_of(canaries)),
        "max_tokens": canaries.max_tokens,
        "interval_s": canaries.interval_seconds,
        "model": served_names(facts.spec)[0],
        "margin_nats": margin_nats(facts),
    }


def canaries_of(facts: Facts) -> Canaries | None:
    """Return the canaries of a spec, or None."""
    return facts.spec.policy.canaries if facts.spec.policy else None


def asked_canaries(facts: Facts) -> Canaries | None:
    """Return the canaries of a spec if its engines are asked, or None."""
    return None if not_asked(facts) else canaries_of(facts)


def prompts_of(canaries: Canaries) -> tuple[str, ...]:
    """Return the prompts, without repetitions."""
    return tuple(dict.fromkeys(canaries.prompts)) or DEFAULT_PROMPTS


@dataclass(frozen=True)
class HourlyCost:
    """Upper bounds of the tokens per hour and engine while answers are right; a wrong answer is asked for twice."""

    generated_tokens: int
    prompt_tokens: int


def hourly_cost(canaries: Canaries) -> HourlyCost:
    """Return the cost of canaries."""
    prompts = prompts_of(canaries)
    rounds = 3600 / canaries.interval_seconds
    # A tokenizer makes at most one token of a byte, plus one to begin with. The check repeats prompt and answer.
    sizes = [len(each.encode("utf-8", "surrogatepass")) + 1 for each in prompts]
    prompt_tokens = sum(2 * size + canaries.max_tokens for size in sizes)
    generated = len(prompts) * (canaries.max_tokens + 1)
    return HourlyCost(round(rounds * generated), round(rounds * prompt_tokens))
