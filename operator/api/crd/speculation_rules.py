"""What speculation can tell about itself, as `deployment_rules.py` says it of the whole."""

from specdecode_operator.api.crd.cel import Reason, Rule
from specdecode_operator.api.values import (
    METHODS_WITH_LOOKUP,
    METHODS_WITH_SAMPLING,
    METHODS_WITH_TARGETS_HEAD,
)
from specdecode_operator.vocabulary import METHODS_NEEDING_DRAFT, METHODS_TAKING_DRAFT, Method


def is_one_of(methods: tuple[Method, ...], method: str = "self.method") -> str:
    """Return the CEL expression that a method is one of these."""
    return f"{method} in [{', '.join(repr(each.value) for each in methods)}]"


_SCHEDULE = "self.numSpeculativeTokensByBatchSize"
_NO_SCHEDULE = f"!has({_SCHEDULE})"
_IS_LOSSY = "has(self.rejectionSampling) && self.rejectionSampling == 'fly'"

SPECULATION = (
    Rule(
        field="numSpeculativeTokens",
        holds="self.method == 'none' || has(self.numSpeculativeTokens)",
        message="method %s needs it: set it to 1 to 32; 5 is a good start",
        values=("self.method",),
        reason=Reason.REQUIRED,
    ),
    Rule(
        field="numSpeculativeTokens",
        holds="self.method == 'none' || !has(self.numSpeculativeTokens) || self.numSpeculativeTokens > 0",
        message="is 0, which proposes nothing: use 1 to 32, or method: none",
    ),
    Rule(
        field="numSpeculativeTokens",
        holds="self.method == 'suffix' || !has(self.numSpeculativeTokens) || self.numSpeculativeTokens <= 32",
        message="is %d, which is more than 32: method %s takes at most 32",
        values=("self.numSpeculativeTokens", "self.method"),
    ),
    Rule(
        field="numSpeculativeTokens",
        holds="self.method != 'none' || !has(self.numSpeculativeTokens)",
        message="method none proposes nothing: remove it, or choose another method",
        reason=Reason.FORBIDDEN,
    ),
    Rule(
        field="draft",
        holds=f"!({is_one_of(METHODS_NEEDING_DRAFT)}) || has(self.draft)",
        message="method %s needs one: set draft.model, or use method: ngram, which needs none",
        values=("self.method",),
        reason=Reason.REQUIRED,
    ),
    Rule(
        field="draft",
        holds=f"{is_one_of(METHODS_TAKING_DRAFT)} || !has(self.draft)",
        message="method %s uses no draft model: remove it, or use the method that it is for, such as draft_model",
        values=("self.method",),
        reason=Reason.FORBIDDEN,
    ),
    Rule(
        field="draft.quantization",
        # The draft's default is there as soon as the draft is.
        holds="self.method == 'draft_model' || !has(self.draft) || !has(self.draft.quantization)"
        " || self.draft.quantization == 'AsCheckpoint'",
        message="is %s, but the head of method %s is served as it was stored: remove it",
        values=("self.draft.quantization", "self.method"),
        reason=Reason.FORBIDDEN,
    ),
    Rule(
        field="draft.checkpoints",
        holds="!has(self.draft) || self.method == 'draft_model' || !has(self.draft.checkpoints)"
        " || self.draft.checkpoints.size() == 0",
        message="the head of method %s is served as it was stored: remove them",
        values=("self.method",),
        reason=Reason.FORBIDDEN,
    ),
    Rule(
        field="useHeterogeneousVocab",
        # Its default is there as soon as speculation is.
        holds="self.method == 'draft_model' || !has(self.useHeterogeneousVocab) || !self.useHeterogeneousVocab",
        message="method %s drafts in the vocabulary of the target: remove it, or use method: draft_model",
        values=("self.method",),
        reason=Reason.FORBIDDEN,
    ),
    Rule(
        field="draftSampling",
        holds="!has(self.useHeterogeneousVocab) || !self.useHeterogeneousVocab || !has(self.draftSampling)"
        " || self.draftSampling == 'greedy'",
        message="a draft of another vocabulary proposes the likeliest tokens: remove it, or useHeterogeneousVocab",
        reason=Reason.FORBIDDEN,
    ),
    Rule(
        field="ngram",
        holds=f"{is_one_of(METHODS_WITH_LOOKUP)} || !has(self.ngram)",
        message="method %s looks nothing up in the prompt: remove it, or use method: ngram",
        values=("self.method",),
        reason=Reason.FORBIDDEN,
    ),
    Rule(
        field="suffix",
        holds="self.method == 'suffix' || !has(self.suffix)",
        message="method %s looks nothing up in earlier answers: remove it, or use method: suffix",
        values=("self.method",),
        reason=Reason.FORBIDDEN,
    ),
    Rule(
        field="rejectionSampling",
        holds="self.method != 'none' || !has(self.rejectionSampling)",
        message="method none proposes nothing to check: remove it, or choose another method",
        reason=Reason.FORBIDDEN,
    ),
    Rule(
        field="lossy",
        holds=f"!({_IS_LOSSY}) || has(self.lossy)",
        message="with rejectionSampling fly answers are others than those of the target itself:"
        " write Accepted if they may be, or use rejectionSampling: block",
        reason=Reason.REQUIRED,
    ),
    Rule(
        field="lossy",
        holds=f"{_IS_LOSSY} || !has(self.lossy)",
        message="nothing is lost without rejectionSampling fly: remove it, or use rejectionSampling: fly",
        reason=Reason.FORBIDDEN,
    ),
    Rule(
        field="rejectionSampling",
        holds=f"!({_IS_LOSSY}) || !has(self.numSpeculativeTokens) || self.numSpeculativeTokens != 1",
        message="fly looks at the tokens after a rejected one, and there is one: set numSpeculativeTokens to 2 or more",
    ),
    Rule(
        field="draftSampling",
        holds=f"{is_one_of(METHODS_WITH_SAMPLING)} || !has(self.draftSampling)",
        message="method %s has no draft that could sample: remove it, or choose a method with a draft",
        values=("self.method",),
        reason=Reason.FORBIDDEN,
    ),
    Rule(
        field="adaptiveVerification",
        holds=f"{is_one_of(METHODS_WITH_SAMPLING)} || !has(self.adaptiveVerification) || !self.adaptiveVerification",
        message="method %s has no draft that says how sure it is: remove it, or choose a method with a draft",
        values=("self.method",),
        reason=Reason.FORBIDDEN,
    ),
    Rule(
        field="draftLmHeadQuantization",
        holds=f"{is_one_of(METHODS_WITH_TARGETS_HEAD)} || !has(self.draftLmHeadQuantization)",
        message="method %s has no copy of the output head of the target: remove it, or use method: eagle or mtp",
        values=("self.method",),
        reason=Reason.FORBIDDEN,
    ),
    Rule(
        field="xpressTopC",
        holds="self.method == 'dflash' || !has(self.xpressTopC)",
        message="method %s has no XPress head: remove it, or use method: dflash with such a head",
        values=("self.method",),
        reason=Reason.FORBIDDEN,
    ),
    Rule(
        field="extraConfig",
        holds="self.method != 'none' || !has(self.extraConfig)",
        message="method none reads no further keys: remove it, or choose another method",
        reason=Reason.FORBIDDEN,
    ),
    Rule(
        field="numSpeculativeTokensByBatchSize",
        holds=f"self.method != 'none' || {_NO_SCHEDULE}",
        message="method none proposes nothing: remove it, or choose another method",
        reason=Reason.FORBIDDEN,
    ),
    Rule(
        field="numSpeculativeTokensByBatchSize",
        holds=f"{_NO_SCHEDULE} || {_SCHEDULE}.all(r, r.from <= r.to)",
        message="a range ends before it begins: its from must not be above its to",
    ),
    Rule(
        field="numSpeculativeTokensByBatchSize",
        # Sorted starts, and each range that is one touches only itself.
        holds=f"{_NO_SCHEDULE} || ({_SCHEDULE}.map(r, r.from).isSorted()"
        f" && {_SCHEDULE}.all(a, a.from > a.to || {_SCHEDULE}.exists_one(b, a.from <= b.to && b.from <= a.to)))",
        message="ranges overlap or are out of order: sort them by from, and begin each after the to of the one before",
    ),
    Rule(
        field="numSpeculativeTokensByBatchSize",
        holds=f"{_NO_SCHEDULE} || !has(self.numSpeculativeTokens)"
        f" || {_SCHEDULE}.all(r, r.numSpeculativeTokens <= self.numSpeculativeTokens)",
        message="a range asks for more than numSpeculativeTokens %d: lower that range, or raise numSpeculativeTokens",
        values=("self.numSpeculativeTokens",),
    ),
)

NGRAM = (
    Rule(
        field="promptLookupMin",
        holds="!has(self.promptLookupMin) || !has(self.promptLookupMax)"
        " || self.promptLookupMin <= self.promptLookupMax",
        message="is %d, above promptLookupMax %d: lower it, or raise promptLookupMax",
        values=("self.promptLookupMin", "self.promptLookupMax"),
    ),
)
