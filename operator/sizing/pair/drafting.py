"""A draft as the engine makes it beside its target, and how many tokens it can be asked for."""

from dataclasses import replace
from functools import lru_cache
from typing import Final

from specdecode_operator.sizing.base.errors import PlanError
from specdecode_operator.sizing.base.remembered import MOST_REMEMBERED
from specdecode_operator.sizing.families.heads import TOKEN_ID_BYTES
from specdecode_operator.sizing.families.prediction import mtp_head
from specdecode_operator.sizing.model.geometry import HeadParts, ModelGeometry
from specdecode_operator.sizing.weights.weights import padded_vocabulary

TOKENS_FIELD: Final = "speculation.numSpeculativeTokens"
"""Where users say how many tokens are proposed a step."""


_PADDED_AT_MOST: Final = 1024
"""Tokens by which vocabularies of one family differ where each was padded to another multiple."""


def vocabulary_mismatch(target: ModelGeometry, draft: ModelGeometry, unless: str = "") -> str | None:
    """Return why vLLM refuses a draft's vocabulary ``unless`` told otherwise; None where it has the target's size.

    It compares the sizes alone (config/speculative.py, verify_equal_vocab_size_if_draft_model), padding and all.
    """
    if draft.vocab_size == target.vocab_size:
        return None
    wanted = f"its vocabulary has {draft.vocab_size} tokens and that of {target.name} {target.vocab_size}"
    if abs(draft.vocab_size - target.vocab_size) <= _PADDED_AT_MOST and _of_one_maker(draft, target):
        return f"{wanted}: one family, padded differently, but {unless}vLLM compares the sizes"
    return f"{wanted}, and {unless}vLLM wants the same"


def _of_one_maker(draft: ModelGeometry, target: ModelGeometry) -> bool:
    makers = [model.name.partition("/")[0] for model in (draft, target) if "/" in model.name]
    return len(makers) == 2 and makers[0] == makers[1]  # noqa: PLR2004  both have one


@lru_cache(maxsize=MOST_REMEMBERED)
def prediction_draft(target: ModelGeometry, num_speculative_tokens: int) -> ModelGeometry:
    """Return the draft that a target's own layers for multi-token prediction make.

    Raises
    ------
    PlanError
        When it has none, or the tokens are above its modules and no multiple
        of them (vLLM, config/speculative.py, __post_init__).
    """
    draft, modules = mtp_head(target), target.mtp_layers
    if num_speculative_tokens > modules and num_speculative_tokens % modules:
        message = (
            f"{target.name} has {modules} modules for multi-token prediction, which are run in turns; "
            f"write {num_speculative_tokens // modules * modules}, or another multiple of {modules}"
        )
        raise PlanError(TOKENS_FIELD, num_speculative_tokens, message)
    return draft


@lru_cache(maxsize=MOST_REMEMBERED)
def fitted_draft(
    draft: ModelGeometry, target: ModelGeometry, num_speculative_tokens: int, least_positions: int = 0
) -> ModelGeometry:
    """Return a draft as the engine makes it for a target; a model of its own stays as it is.

    A head takes the target's embedding and output head in the place of its own where they have the same shape (vLLM,
    v1/worker/gpu/spec_decode), and Medusa has as many heads as tokens are proposed (configs/medusa.py). The rotary
    table of EAGLE has as many rows as the target's longest request has positions.

    Raises
    ------
    PlanError
        When the head cannot propose so many tokens.
    """
    parts = draft.head
    if parts is None:
        return draft
    _refuse_tokens(draft.name, parts, num_speculative_tokens)
    if parts.medusa_heads:
        return replace(draft, head=_built_heads(parts, target.vocab_size, num_speculative_tokens))
    rows = parts.output_rows
    token_map_bytes = rows * TOKEN_ID_BYTES if rows and rows != target.vocab_size else 0
    fitted = replace(
        parts,
        shares_embedding=parts.shares_embedding and _same_shape(draft, draft.vocab_size, target),
        shares_output=parts.shares_output and (not rows or _same_shape(draft, rows, target)),
        whole_bytes=parts.whole_bytes - parts.token_map_bytes + token_map_bytes,
        token_map_bytes=token_map_bytes,
    )
    ropes = tuple(replace(rope, positions=max(rope.positions, least_positions)) for rope in draft.ropes)
    return replace(draft, head=fitted, ropes=ropes)


def _refuse_tokens(name: str, parts: HeadParts, num_speculative_tokens: int) -> None:
    if parts.most_tokens is not None and num_speculative_tokens > parts.most_tokens:
        message = f"{name} was trained to propose at most {parts.most_tokens} a step; write {parts.most_tokens} or less"
        raise PlanError(TOKENS_FIELD, num_speculative_tokens, message)
    # vLLM reads its mixer of places as one of K + 1, whatever it has
    # (vllm/v1/worker/gpu/spec_decode/xpress/kernels.py).
    if parts.refiner is not None and num_speculative_tokens != parts.refiner.places - 1:
        wanted = parts.refiner.places - 1
        message = f"{name} refines blocks of {wanted} proposed tokens, no fewer; write {wanted}"
        raise PlanError(TOKENS_FIELD, num_speculative_tokens, message)


def _built_heads(parts: HeadParts, vocabulary: int, num_speculative_tokens: int) -> HeadParts:
    """Return Medusa with a head a token and the target's vocabulary (vLLM, config/speculative.py)."""
    one_output = parts.output_heads < parts.medusa_heads
    return replace(
        parts,
        output_rows=parts.output_rows if one_output else vocabulary,
        output_heads=1 if one_output else num_speculative_tokens,
        whole_elements=parts.whole_elements * num_speculative_tokens // parts.medusa_heads,
    )


def _same_shape(draft: ModelGeometry, rows: int, target: ModelGeometry) -> bool:
    same_rows = padded_vocabulary(rows) == padded_vocabulary(target.vocab_size)
    return same_rows and draft.hidden_size == target.hidden_size
