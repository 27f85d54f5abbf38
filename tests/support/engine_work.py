"""Engines that count what they do, look by look."""

from dataclasses import dataclass, field, replace

from specdecode_operator.vllm.engine_metrics import EngineReading, SpeculationReading

LOOK_S = 15.0


@dataclass
class Working:
    """An engine under a load: each look has its steps behind it."""

    k: int = 4
    reading: EngineReading = field(
        default_factory=lambda: EngineReading(
            num_gpu_blocks=None,
            block_size=None,
            kv_cache_tokens=None,
            kv_cache_max_concurrency=None,
            speculation=SpeculationReading(0, 0, 0, ()),
            generation_tokens=0,
            requests_running=0,
            requests_waiting=0,
            decode_steps=0,
            decode_seconds=0.0,
            first_tokens=0,
        )
    )

    def works(
        self, acceptance: float, token_s: float = 0.01, running: float = 8, k: int | None = None, drafting: float = 1
    ) -> EngineReading:
        """Return what it says after another look's time.

        Parameters
        ----------
        acceptance
            Share of the drafted tokens that were accepted.
        token_s
            What a token took.
        running
            Requests at once.
        drafting
            Share of the steps with a draft.
        """
        before, length = self.reading, self.k if k is None else k
        assert before.speculation is not None
        assert before.decode_steps is not None
        assert before.decode_seconds is not None
        busy_s = running * LOOK_S
        tokens = round(busy_s / token_s)
        steps = round(tokens / (1 + acceptance * length * drafting))
        drafts, seen = round(steps * drafting), before.speculation
        accepted = round(acceptance * length * drafts)
        self.reading = replace(
            before,
            generation_tokens=before.generation_tokens + tokens,
            decode_steps=before.decode_steps + steps,
            decode_seconds=before.decode_seconds + busy_s,
            speculation=SpeculationReading(
                seen.drafts + drafts,
                seen.draft_tokens + length * drafts,
                seen.accepted_tokens + accepted,
                (seen.accepted_tokens + accepted, *[0] * (self.k - 1)),
            ),
        )
        return self.reading
