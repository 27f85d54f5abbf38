"""Blocks of many series, a line each, in any order: each line is answered from those before it alone."""

from dataclasses import dataclass
from typing import Any, Final

from specdecode_operator.documents.json_text import parse_json
from specdecode_operator.documents.limits import UnreadableTextError
from specdecode_operator.evidence.block import Block, BlockError, SeriesName, read_block
from specdecode_operator.evidence.series import Finding, PairedSeries
from specdecode_operator.problems import Problem, shown

MOST_LINE_BYTES: Final = 64 * 2**10
MOST_SERIES: Final = 20_000
MOST_BLOCKS: Final = 100_000
"""Of a series."""
MOST_BLOCKS_IN_ALL: Final = 5_000_000
"""A block takes 24 bytes, a series up to 28 kB beside: 0.7 GB at the most."""


@dataclass
class _State:
    """A series, and the number of its last block."""

    series: PairedSeries
    last: int | None = None
    blocks: int = 0
    finding: Finding | None = None


class Batch:
    """All series of an input.

    Parameters
    ----------
    level
        Of the intervals.
    """

    def __init__(self, level: float) -> None:
        self._level = level
        self._states: dict[SeriesName, _State] = {}
        self.lines = self.errors = self._blocks = 0

    def answer(self, number: int, text: str | bytes) -> dict[str, Any]:
        """Return the answer to a line of the input, as it is written: a finding, or what is wrong with the line."""
        self.lines += 1
        try:
            block = read_block(parse_json(text, MOST_LINE_BYTES))
            finding = self._add(block)
        except UnreadableTextError as error:
            return self._refused(number, BlockError(str(error)))
        except BlockError as error:
            return self._refused(number, error)
        return {
            "series": block.series,
            "block": block.block,
            "verdict": finding.verdict.value,
            "ratio": finding.ratio,
            "low": finding.low,
            "high": finding.high,
            "level": self._level,
        }

    def findings(self) -> dict[SeriesName, tuple[int, Finding]]:
        """Return the last finding of each series, with the number of its blocks."""
        return {name: (each.blocks, each.finding) for name, each in self._states.items() if each.finding}

    def _refused(self, number: int, error: BlockError) -> dict[str, Any]:
        self.errors += 1
        return {"series": error.series, "block": error.block, "error": f"line {number}: {error}"}

    def _add(self, block: Block) -> Finding:
        state = self._states.get(block.series) or _State(PairedSeries(self._level))
        problem = self._problem(block, state)
        if problem is not None:
            raise BlockError(problem, block.series, block.block)
        self._states[block.series] = state
        self._blocks += 1
        state.last, state.blocks = block.block, state.blocks + 1
        state.finding = state.series.add(block.baseline, block.candidate)
        return state.finding

    def _problem(self, block: Block, state: _State) -> Problem | None:
        number, name = shown(block.block), shown(block.series)
        if state.last is not None and block.block <= state.last:
            fix = f"must be larger than that of the block before it in its series, {state.last}"
            return Problem("block", number, fix)
        if not state.blocks and len(self._states) >= MOST_SERIES:
            return Problem("series", name, f"is one more than the {MOST_SERIES:,} that are kept: divide the input")
        if state.blocks >= MOST_BLOCKS:
            return Problem("block", number, f"its series has {MOST_BLOCKS:,} already: make blocks longer")
        if self._blocks >= MOST_BLOCKS_IN_ALL:
            return Problem("block", number, f"all series have {MOST_BLOCKS_IN_ALL:,} already: divide the input")
        return None
