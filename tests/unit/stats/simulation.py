"""An engine that drafts and verifies token by token with dice: what the closed formulas are held against."""

import random
from dataclasses import dataclass, field

from specdecode_operator.stats.payoff import StepCosts

STEPS = 20_000


@dataclass
class Counted:
    """Counters as vLLM has them, and the time that has passed."""

    drafts: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    tokens: int = 0
    ms: float = 0.0


def decoded(
    conditional: tuple[float, ...], costs: StepCosts, batch: int, context: float = 0.0, seed: int = 0
) -> Counted:
    """Let a batch decode: in each step every request proposes K tokens one by one, and keeps those before a refusal."""
    dice, k = random.Random(seed), len(conditional)
    counted = Counted(accepted_per_position=[0] * k)
    reads = batch * context / 1000
    for _ in range(STEPS // batch):
        passes = [batch * k] if costs.one_pass else [batch] * k
        for proposed in passes:
            counted.ms += costs.draft.ms(proposed) + costs.draft_ms_per_1000_context * reads
        counted.ms += costs.target.ms(batch * (k + 1)) + costs.target_ms_per_1000_context * reads
        for _ in range(batch):
            counted.drafts += 1
            counted.tokens += 1
            for position, share in enumerate(conditional):
                if dice.random() >= share:
                    break
                counted.accepted_per_position[position] += 1
                counted.tokens += 1
    return counted


def verified(draft: list[float], target: list[float], k: int, dice: random.Random) -> list[int]:
    """Return the tokens of one step, by rejection sampling (Leviathan et al. 2023, algorithm 1)."""
    kept: list[int] = []
    vocabulary = range(len(target))
    for _ in range(k):
        token = dice.choices(vocabulary, draft)[0]
        if dice.random() < min(1.0, target[token] / draft[token]):
            kept.append(token)
            continue
        rest = [max(0.0, wanted - had) for wanted, had in zip(target, draft, strict=True)]
        return [*kept, dice.choices(vocabulary, rest)[0]]
    return [*kept, dice.choices(vocabulary, target)[0]]
