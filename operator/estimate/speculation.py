"""What a case says of speculation: vLLM's --speculative-config, under the names that `names.py` has."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from specdecode_operator.api.values import (
    METHODS_WITH_TARGETS_HEAD,
    DraftHeadQuantization,
    DraftSampling,
    RejectionSampling,
)
from specdecode_operator.estimate.fields import CaseFields
from specdecode_operator.estimate.limits import REJECTION_KEY
from specdecode_operator.estimate.models import model_geometry, wanted_precision
from specdecode_operator.estimate.names import SPECULATIVE_REMARKS, SPECULATIVE_SPELLINGS
from specdecode_operator.sizing.base.remembered import MadeOfContent
from specdecode_operator.sizing.model.geometry import ModelGeometry
from specdecode_operator.vocabulary import METHODS_IN_PARALLEL, METHODS_NEEDING_DRAFT, METHODS_TAKING_DRAFT, Method

MOST_TOKENS: Final = 2**31 - 1
_RANGE_NUMBERS: Final = 3
_MTP: Final = "_mtp"

_MADE_UP: Final = "synthetic"
"""A check of drafted tokens that no spec may ask for; it takes what standard takes."""


class Speculation(NamedTuple):
    """What a case says of speculation."""

    fields: CaseFields | None  # As the case says it, by our names; None where it says nothing
    of_pair: Mapping[str, Any]  # What a pair has of it, by its fields


_READ: Final = MadeOfContent[Mapping[str, Any]]()


def read_speculation(section: CaseFields) -> Speculation:
    """Return what a case says of speculation in its section.

    Raises
    ------
    CaseError
        Naming the first key that is wrong.
    """
    speculative = section.named(SPECULATIVE_SPELLINGS, SPECULATIVE_REMARKS)
    return Speculation(speculative, _READ.get(section.values, (section.prefix,), lambda: _of_pair(speculative)))


def _of_pair(speculative: CaseFields) -> Mapping[str, Any]:
    method = _method(speculative)
    draft = _draft(speculative, method) if _has_draft(speculative, method) else None
    tokens = 0 if method is Method.NONE else _num_speculative_tokens(speculative)
    return {
        "draft": draft,
        "draft_precision": None if draft is None else wanted_precision(speculative, draft),
        "method": method,
        "num_speculative_tokens": tokens,
        "samples_drafts": _samples_drafts(speculative),
        "draft_head_quantization": _draft_head_quantization(speculative, method),
        "refined_candidates": _refined_candidates(speculative, draft),
        "maps_vocabulary": speculative.flag("use_heterogeneous_vocab"),
        "adaptive_verification": speculative.flag("enable_adaptive_verification"),
        "checks_by_entropy": _checks_by_entropy(speculative),
        "other_draft_lengths": _other_draft_lengths(speculative, tokens),
    }


NO_SPECULATION: Final = Speculation(
    None, {"draft": None, "draft_precision": None, "method": Method.NONE, "num_speculative_tokens": 0}
)
"""What holds where a case says nothing of it."""


def _method(speculative: CaseFields) -> Method:
    method = speculative.text("method")
    if method is None:
        raise speculative.error("method", f"is missing: use one of {', '.join(Method)}")
    if method.endswith(_MTP):
        # One for each family in vLLM (config/speculative.py, MTPModelTypes).
        return Method.MTP
    if method not in tuple(Method):
        raise speculative.error("method", f"cannot be sized: use one of {', '.join(Method)}")
    return Method(method)


def _has_draft(speculative: CaseFields, method: Method) -> bool:
    """Whether it drafts with a checkpoint of its own: dspark and mtp may draft with the target's."""
    named = speculative.values.get("model") is not None or speculative.values.get("model_config") is not None
    return method in METHODS_NEEDING_DRAFT or (named and method in METHODS_TAKING_DRAFT)


def _draft(speculative: CaseFields, method: Method) -> ModelGeometry:
    """Return the draft; the engine drafts in one pass where it is told to, whatever the draft was trained for."""
    draft = model_geometry(speculative, method)
    in_parallel = speculative.flag("parallel_drafting") and method in METHODS_IN_PARALLEL
    return draft if draft.drafts_in_parallel == in_parallel else replace(draft, drafts_in_parallel=in_parallel)


def _num_speculative_tokens(speculative: CaseFields) -> int:
    tokens = speculative.whole("num_speculative_tokens", MOST_TOKENS)
    if tokens is None:
        raise speculative.error("num_speculative_tokens", "is missing: say how many tokens are proposed a step")
    return tokens


def _samples_drafts(speculative: CaseFields) -> bool:
    way = speculative.text("draft_sample_method")
    if way not in (None, *DraftSampling):
        raise speculative.error("draft_sample_method", f"is not known: use one of {', '.join(DraftSampling)}")
    return way == DraftSampling.PROBABILISTIC


def _checks_by_entropy(speculative: CaseFields) -> bool:
    way = speculative.text(REJECTION_KEY)
    if way not in (None, _MADE_UP, *RejectionSampling):
        raise speculative.error(REJECTION_KEY, f"is not known: use one of {', '.join(RejectionSampling)}")
    return way == RejectionSampling.FLY


def _draft_head_quantization(speculative: CaseFields, method: Method) -> str | None:
    key = "draft_lm_head_quantization"
    kind = speculative.text(key)
    if kind is not None and (kind not in tuple(DraftHeadQuantization) or method not in METHODS_WITH_TARGETS_HEAD):
        raise speculative.error(key, "use one of fp8, nvfp4, with method eagle or mtp")
    return kind


def _refined_candidates(speculative: CaseFields, draft: ModelGeometry | None) -> int | None:
    key = "xpress_topc"
    asked = speculative.values.get(key)
    if asked is None:
        return None
    if draft is None or draft.head is None or draft.head.refiner is None:
        raise speculative.error(key, "is of XPress heads alone: remove it")
    if type(asked) is not int or not 0 <= asked <= draft.vocab_size:
        raise speculative.error(key, f"must be a whole number from 0 to the vocabulary, {draft.vocab_size}")
    return asked


def _other_draft_lengths(speculative: CaseFields, tokens: int) -> frozenset[int]:
    """Return the tokens of other numbers of requests: [[first, last, tokens], …]."""
    key = "num_speculative_tokens_per_batch_size"
    ranges = speculative.values.get(key)
    if ranges is None:
        return frozenset()
    found = set()
    for each in ranges if isinstance(ranges, list) else [None]:
        if not isinstance(each, list) or len(each) != _RANGE_NUMBERS or not all(type(number) is int for number in each):
            raise speculative.error(key, "must be a list of [first, last, tokens]")
        if not 0 <= each[-1] <= tokens:
            raise speculative.error(key, f"must name 0 to {tokens} tokens, as many as num_speculative_tokens")
        found.add(each[-1])
    return frozenset(found - {tokens})
