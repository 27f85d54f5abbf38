"""What to change when nothing fits: single changes and pairs of settings, each tried, least harm first."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Final

from specdecode_operator.sizing.choice import changes
from specdecode_operator.sizing.choice.candidates import PLACE_ONLY, PlanOptions
from specdecode_operator.sizing.choice.changes import Changes, Kind, Question
from specdecode_operator.sizing.choice.explanations import capacity_phrase
from specdecode_operator.sizing.choice.node_placement import GpuPool
from specdecode_operator.sizing.choice.other_models import NO_ALTERNATIVES, Alternatives
from specdecode_operator.sizing.choice.plan_row import Row
from specdecode_operator.sizing.memory.budget import Verdict
from specdecode_operator.sizing.pair.pair import Pair

_NOTABLY_LONGER: Final = 1.25
"""By how much longer requests may get before a second setting beside their length is worth a line: our own choice."""

_SETTINGS: Final = (changes.more_utilization, changes.fewer_batched_tokens, changes.fewer_sequences)
"""Settings of the engine that cost no quality."""

_FROM_WORST: Final = (Verdict.DOES_NOT_FIT, Verdict.TIGHT, Verdict.FITS)
_BEST: Final = _FROM_WORST.index(Verdict.FITS)

Admit = Callable[[Pair, Changes], Changes | None]
"""Whether a pair may be served after changes: those, with what has to go along; None where it would be refused."""


def all_admitted(_: Pair, asked: Changes) -> Changes:
    """Admit every change as it is."""
    return asked


@dataclass(frozen=True)
class Fix:
    """One change, or two that go together, that makes it fit."""

    changes: Changes  # Fields and their new values
    verdict: Verdict  # What the plan would say then
    # KV cache tokens and full-length requests it would have then
    tokens: int
    concurrency: float
    effect: str  # What the KV cache would hold, and where
    # By how much the change widens, on each GPU, what is left for the KV cache over what is needed of it
    gained_bytes: int = 0

    @property
    def change(self) -> str:
        """Fields and new values in words, such as ``target.quantization: FP8``."""
        return ", ".join(map(str, self.changes))

    @property
    def sentence(self) -> str:
        """The change and its effect."""
        return f"{self.change} gives {self.effect}"


def find_fixes(  # noqa: PLR0913, PLR0917 (one fact each)
    pair: Pair,
    pools: Sequence[GpuPool],
    tensor: int | None,
    chosen: Row,
    alternatives: Alternatives = NO_ALTERNATIVES,
    admit: Admit = all_admitted,
    options: PlanOptions = PLACE_ONLY,
) -> tuple[Fix, ...]:
    """Return what makes the pair fit, least harm first; what ends tight says so.

    First settings that cost no quality, alone and two together, then
    precision (the draft's before the KV cache's before the target's: the
    draft cannot change the output), then what the service promises, then
    hardware, then another draft or none. Two settings are only named where
    they end better than each alone, a precision that needs a checkpoint only
    where the user has one, and nothing that ``admit`` refuses. What ``options``
    leave open stays open after a change.
    """
    question = Question(pair, tuple(pools), tensor, replace(options, spread=chosen.spread))
    search = _Search(question, chosen, admit)
    found = [
        *map(search.smallest, _SETTINGS),
        search.together(combinations(_SETTINGS, 2)),
        search.most_room(),
        search.smallest(partial(changes.quantized_draft, alternatives=alternatives)),
        search.smallest(changes.kv_fp8),
        search.smallest(changes.sixteen_bits),
        search.together((changes.kv_fp8, setting) for setting in _SETTINGS),
        search.smallest(partial(changes.quantized_target, alternatives=alternatives)),
        search.smallest(changes.lower_min_concurrency),
        *search.lengths((changes.highest_utilization, changes.kv_fp8)),
        search.smallest(changes.more_of_these),
        search.smallest(changes.other_products),
        search.smallest(partial(changes.smaller_draft, alternatives=alternatives)),
        search.smallest(changes.own_layers),
        search.smallest(partial(changes.head, alternatives=alternatives)),
        search.smallest(changes.no_draft),
    ]
    return tuple({fix.change: fix for fix in found if fix is not None}.values())


class _Search:
    """Tries changes of a question; each kind is looked for once."""

    def __init__(self, question: Question, chosen: Row, admit: Admit) -> None:
        self._question = question
        self._chosen = chosen
        self._admit = admit
        self._alone: dict[Kind, Fix | None] = {}

    def smallest(self, kind: Kind) -> Fix | None:
        """Return the first change of a kind that fits, or else the first that is tight."""
        if kind not in self._alone:
            self._alone[kind] = self._first(kind)
        return self._alone[kind]

    def together(self, pairs: Iterable[tuple[Kind, Kind]]) -> Fix | None:
        """Return the first two kinds of change that end better together than each alone."""
        for first, second in pairs:
            alone = max(_rank(self.smallest(first)), _rank(self.smallest(second)))
            if alone < _BEST and (fix := self._first(changes.both(first, second))) and _rank(fix) > alone:
                return fix
        return None

    def most_room(self) -> Fix | None:
        """Return all that settings can give without cost to quality, where no single one of them suffices."""
        alone = map(self.smallest, (changes.more_utilization, changes.fewer_batched_tokens))
        fix = None if _BEST in map(_rank, alone) else self._first(changes.most_room)
        return fix if _rank(fix) == _BEST else None

    def lengths(self, partners: Sequence[Kind]) -> Iterator[Fix]:
        """Yield the longest requests that fit, alone and beside settings that do not suffice but allow longer ones."""
        longest = 0.0
        insufficient = [each for each in partners if _rank(self.smallest(each)) < _BEST]
        for kind in (changes.shorter_length, *(changes.both(changes.shorter_length, each) for each in insufficient)):
            fix = self._first(kind)
            if fix is not None and _length(fix) >= longest * _NOTABLY_LONGER:
                longest = _length(fix)
                yield fix

    def _first(self, kind: Kind) -> Fix | None:
        tight = None
        for question in kind(self._question):
            fix = self._tried(question)
            if fix is not None and fix.verdict is Verdict.FITS:
                return fix
            tight = tight or fix
        return tight

    def _tried(self, question: Question) -> Fix | None:
        """Return the fix that a change is; None where it does not fit, or would be refused."""
        row = question.best_row()
        if row is None or row.budget.verdict is Verdict.DOES_NOT_FIT:
            return None
        admitted = self._admit(question.pair, question.changes)
        return None if admitted is None else _fix(admitted, question.pair, row, self._chosen)


def _fix(admitted: Changes, pair: Pair, row: Row, chosen: Row) -> Fix:
    capacity = capacity_phrase(row.budget, pair.limits.max_model_len, row.split)
    same_place = (row.product, row.split) == (chosen.product, chosen.split)
    place = "" if same_place else f" on {row.place}"
    tight = " (tight)" if row.budget.verdict is Verdict.TIGHT else ""
    return Fix(
        changes=admitted,
        verdict=row.budget.verdict,
        tokens=row.budget.kv_cache_tokens,
        concurrency=row.budget.max_concurrency,
        effect=f"{capacity}{place}{tight}",
        gained_bytes=_spare_bytes(row) - _spare_bytes(chosen),
    )


def _spare_bytes(row: Row) -> int:
    """Return what is left for the KV cache over what is needed of it; negative where it lacks."""
    return row.budget.available_kv_bytes - row.budget.needed_kv_bytes


def _rank(fix: Fix | None) -> int:
    return 0 if fix is None else _FROM_WORST.index(fix.verdict)


def _length(fix: Fix) -> int:
    return next(
        each.value for each in fix.changes if each.field == changes.LENGTH_FIELD and isinstance(each.value, int)
    )
