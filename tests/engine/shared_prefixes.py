"""Prompts that begin like an earlier one, and how much of them a serving engine finds in its prefix cache."""

from collections.abc import Mapping, Sequence

from specdecode_operator.sizing.memory.prefix_cache import prefix_tax
from tests.engine.engine_versions import SERVED
from tests.engine.recorder_clients import Question
from tests.engine.recorder_server import Line, Server

_OWN = 6
"""Tokens in which each prompt goes on as no other does."""


def block_tokens(server: Server) -> int:
    """Return the tokens in a block, as the engine resolved them."""
    (size,) = {segment[0]["config"]["block_size"] for segment in server.segments()}
    return int(size)


def pairs(block: int) -> dict[int, tuple[Question, Question]]:
    """Return two questions for each number of tokens that they share, of which the first must be asked first."""
    found = {}
    for number, shared in enumerate((block - 1, block, block + 1, 2 * block, 3 * block - 1, 3 * block + 1)):
        # No other prompt begins so.
        prefix = [16, 16, 10 + number, *[10 + position % 5 for position in range(shared - 3)]]
        first, second = (
            Question(f"{name}-{shared}", prefix + [token] * _OWN, max_tokens=4)
            for name, token in (("shared", 18), ("again", 19))
        )
        found[shared] = (first, second)
    return found


def assert_found(method: str, block: int, shared: Sequence[int], records: Mapping[str, Line]) -> None:
    """Fail unless of each shared prefix as much was found as we say, and of the first prompts nothing."""
    tax = prefix_tax(f"{SERVED}.0", method, block)
    assert tax is not None
    found = {tokens: records[f"again-{tokens}"]["cached_tokens"] for tokens in shared}
    assert found == {tokens: tax.found(tokens) for tokens in shared}
    assert max(found.values()) > 0
