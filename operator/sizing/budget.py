"""The memory of one GPU, term by term, and whether the pair fits."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from specdecode_operator.sizing.devices import Device, memory_coefficients
from specdecode_operator.sizing.divisibility import tensor_problems
from specdecode_operator.sizing.errors import PlanError
from specdecode_operator.sizing.kv import kv_bytes_per_token, kv_capacity, required_blocks
from specdecode_operator.sizing.memory import activation_bytes, state_bytes
from specdecode_operator.sizing.pair import EngineLimits, Pair
from specdecode_operator.sizing.precision import Precision
from specdecode_operator.sizing.units import ceil_div
from specdecode_operator.sizing.weights import weight_bytes

TENSOR_FIELD: Final = "parallelism.tensor"
"""Where users say over how many GPUs to split."""


class Verdict(StrEnum):
    """Whether min_concurrency requests of max_model_len can be served."""

    FITS = "Fits"
    """Also after the safety margin."""

    TIGHT = "Tight"
    """Only before the margin."""

    DOES_NOT_FIT = "DoesNotFit"
    """Not at all."""


class Term(StrEnum):
    """What keeps a budget from fitting."""

    WEIGHTS = "weights"
    """The weights alone take all that the engine may use."""

    OVERHEAD = "overhead"
    """Weights fit, but what the engine needs to run leaves nothing for the KV cache."""

    KV_CACHE = "kv_cache"
    """What is left for the KV cache holds too few requests."""

    UTILIZATION = "memory_utilization_percent"
    """The engine asks for more than is free when it starts."""

    MEMORY = "memory"
    """On CPU: the memory given is less than all terms together."""

    MARGIN = "margin"
    """It fits, but not after the safety margin."""


@dataclass(frozen=True)
class Budget:
    """Memory of one GPU (on CPU: of one replica) in bytes, by term.

    ``requested`` less the six terms is ``available_kv``.

    Attributes
    ----------
    total_bytes
        Memory of the device.
    requested_bytes
        What the engine claims of it. On CPU: what it will take in all.
    target_weights_bytes
        Weights of the target, and the rotary table it loads.
    draft_weights_bytes
        Weights of the draft, and its rotary table where it cannot share the target's.
    state_bytes, activation_bytes, cuda_graphs_bytes, non_torch_bytes
        What the engine needs to run.
    available_kv_bytes
        What is left for the KV cache; negative when the rest is too much.
    needed_kv_bytes
        KV cache without which the verdict is DoesNotFit.
    margin_bytes
        What the verdict keeps back because estimates err.
    kv_bytes_per_token
        KV cache of one token in target and draft.
    num_blocks, kv_cache_tokens, max_concurrency
        What the available KV cache holds, before the margin, as vLLM reports it.
    verdict
        Whether it fits.
    binding_term
        What breaks it; None when it fits.
    """

    total_bytes: int
    requested_bytes: int
    target_weights_bytes: int
    draft_weights_bytes: int
    state_bytes: int
    activation_bytes: int
    cuda_graphs_bytes: int
    non_torch_bytes: int
    available_kv_bytes: int
    needed_kv_bytes: int
    margin_bytes: int
    kv_bytes_per_token: int
    num_blocks: int
    kv_cache_tokens: int
    max_concurrency: float
    verdict: Verdict
    binding_term: Term | None

    @property
    def weights_bytes(self) -> int:
        """Weights of target and draft together."""
        return self.target_weights_bytes + self.draft_weights_bytes


@dataclass(frozen=True)
class PairWeights:
    """Bytes that one rank loads."""

    target_bytes: int
    draft_bytes: int


def estimate(pair: Pair, device: Device, tensor: int) -> Budget:
    """Return the budget of each GPU when the pair is split over so many of them.

    The rules are those of vLLM 0.32's gpu_worker.py: a share of the device,
    less weights, buffers, the profiled peak, non-torch memory and graphs, is
    the KV cache.

    Raises
    ------
    PlanError
        When the models cannot be split so.
    """
    refuse_bad_split(pair, tensor)
    coefficients = memory_coefficients()
    requested = ceil_div(device.total_bytes * pair.limits.memory_utilization_percent, 100)
    weights = pair_weights(pair, tensor)
    state = state_bytes(pair)
    activation = activation_bytes(pair, tensor)
    graphs = 0 if pair.limits.enforce_eager else coefficients.cuda_graphs_bytes
    non_torch = coefficients.non_torch_bytes(tensor)
    weights_bytes = weights.target_bytes + weights.draft_bytes
    available = requested - weights_bytes - state - activation - graphs - non_torch
    bytes_per_token = pair_kv_bytes_per_token(pair, tensor)
    capacity = kv_capacity(available, bytes_per_token, pair.limits.block_size, pair.limits.max_model_len)
    needed = needed_kv_bytes(pair, tensor)
    term = _broken_term(
        starts=requested <= device.total_bytes - coefficients.context_bytes,
        weights_fit=weights_bytes < requested,
        spare_bytes=available - needed,
        available_bytes=available,
        margin_bytes=coefficients.margin_bytes,
    )
    return Budget(
        total_bytes=device.total_bytes,
        requested_bytes=requested,
        target_weights_bytes=weights.target_bytes,
        draft_weights_bytes=weights.draft_bytes,
        state_bytes=state,
        activation_bytes=activation,
        cuda_graphs_bytes=graphs,
        non_torch_bytes=non_torch,
        available_kv_bytes=available,
        needed_kv_bytes=needed,
        margin_bytes=coefficients.margin_bytes,
        kv_bytes_per_token=bytes_per_token,
        num_blocks=capacity.num_blocks,
        kv_cache_tokens=capacity.tokens,
        max_concurrency=capacity.max_concurrency,
        verdict=verdict_of(term),
        binding_term=term,
    )


def refuse_bad_split(pair: Pair, tensor: int) -> None:
    """Raise PlanError with the first thing that stops the pair from being split so."""
    if tensor < 1:
        raise PlanError(TENSOR_FIELD, tensor, "must be 1 or more")
    problems = tensor_problems(pair.target, tensor, pair.target_precision)
    if pair.draft is not None:
        problems += tensor_problems(pair.draft, tensor, pair.draft_precision)
    if problems:
        raise PlanError(TENSOR_FIELD, tensor, problems[0].message)


def pair_weights(pair: Pair, tensor: int) -> PairWeights:
    """Return what one rank loads; a rotary table that both models use is counted once."""
    target = weight_bytes(pair.target, pair.target_precision, tensor)
    target += pair.target.rope.size_bytes(pair.target.dtype_bytes)
    if pair.draft is None:
        return PairWeights(target, 0)
    precision = pair.draft_precision or pair.draft.checkpoint_precision or Precision.BF16
    draft = weight_bytes(pair.draft, precision, tensor)
    if pair.draft.rope != pair.target.rope:
        draft += pair.draft.rope.size_bytes(pair.draft.dtype_bytes)
    return PairWeights(target, draft)


def pair_kv_bytes_per_token(pair: Pair, tensor: int) -> int:
    """Return the KV cache of one token in the layers of target and draft."""
    element = pair.limits.kv_cache_element_bytes
    target = kv_bytes_per_token(pair.target, tensor, element)
    return target + (0 if pair.draft is None else kv_bytes_per_token(pair.draft, tensor, element))


def needed_kv_bytes(pair: Pair, tensor: int) -> int:
    """Return the KV cache that min_concurrency requests of full length take, with the null block."""
    limits = pair.limits
    blocks = required_blocks(limits.max_model_len, limits.block_size, limits.min_concurrency)
    return blocks * limits.block_size * pair_kv_bytes_per_token(pair, tensor)


def verdict_of(term: Term | None) -> Verdict:
    """Return the verdict that follows from what breaks the budget."""
    if term is None:
        return Verdict.FITS
    return Verdict.TIGHT if term is Term.MARGIN else Verdict.DOES_NOT_FIT


def _broken_term(
    *, starts: bool, weights_fit: bool, spare_bytes: int, available_bytes: int, margin_bytes: int
) -> Term | None:
    if not weights_fit:
        return Term.WEIGHTS
    if available_bytes <= 0:
        return Term.OVERHEAD
    if spare_bytes < 0:
        return Term.KV_CACHE
    if not starts:
        return Term.UTILIZATION
    return Term.MARGIN if spare_bytes < margin_bytes else None


__all__ = ["Budget", "EngineLimits", "Pair", "Term", "Verdict", "estimate"]
