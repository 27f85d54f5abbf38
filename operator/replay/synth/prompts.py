"""Prompts without words: lengths, and the hashes of their blocks, which say what they have in common."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from specdecode_operator.capture.recorder.block_hashes import block_hashes
from specdecode_operator.replay.synth.lengths import Lengths

_ID_BITS = 31


@dataclass(frozen=True)
class Prompts:
    """What requests are asked: the same for the same seed."""

    prompt_tokens: Lengths
    output_tokens: Lengths
    shared_prefix_tokens: int
    block_size: int
    seed: int

    def lengths(self, name: str) -> tuple[int, int]:
        """Return how long a request's own part and its answer are; the shared prefix comes on top of the first."""
        random = Random(f"{self.seed}/{name}/lengths")  # noqa: S311  not for secrets
        return self.prompt_tokens.draw(random), self.output_tokens.draw(random)

    def hashes(self, conversation: str, tokens: int) -> Sequence[int]:
        """Return the hashes of the full blocks of a conversation's first tokens, of which the prefix is everyone's.

        One number stands for the content of a block: chained as those of tokens are, and much faster.
        """
        shared = self.shared_prefix_tokens // self.block_size
        blocks = tokens // self.block_size
        ids = [*self._ids("prefix", min(shared, blocks)), *self._ids(conversation, blocks - min(shared, blocks))]
        return block_hashes(ids, 1, _no_pause)

    def _ids(self, purpose: str, count: int) -> list[int]:
        random = Random(f"{self.seed}/{purpose}/blocks")  # noqa: S311  not for secrets
        return [random.getrandbits(_ID_BITS) for _ in range(count)]


def _no_pause() -> None:
    pass
