"""Where the engine cannot verify only as many drafted tokens as pay: for the target's layers, or the GPU's kernels.

What else excludes it: engine/rules/adaptive_verification.py.
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Final

from specdecode_operator.sizing.base.devices import generation_of
from specdecode_operator.sizing.base.eras import sizing_facts
from specdecode_operator.sizing.base.errors import PlanError
from specdecode_operator.sizing.choice.precision_rules import BACKEND_FIELD
from specdecode_operator.sizing.families.heads import XPRESS
from specdecode_operator.sizing.model.geometry import ModelGeometry
from specdecode_operator.sizing.model.layers import DeltaNet, LatentAttention, SelectiveScan, SelfAttention, StateSpace
from specdecode_operator.sizing.pair.pair import Pair

FIELD: Final = "speculation.adaptiveVerification"

_STATES: Final[Mapping[type, str]] = {SelectiveScan: "mamba1", StateSpace: "mamba2", DeltaNet: "gdn"}
"""vLLM's names of layers that keep states (vllm/v1/attention/backends)."""

_OF_LATENT: Final = "MLA"
"""In the name of every backend of latent attention."""

_FIRST_CHOICE: Final = "FLASH_ATTN"
"""What vLLM takes before all others but for sinks, which FlashAttention 2 lacks (vllm/platforms/cuda.py)."""

_UNSURE_HEADS: Final = frozenset(XPRESS)
"""Heads of dflash that are never asked how sure they are, which vLLM passes over: it ranks by what lies in memory
(v1/worker/gpu/spec_decode/xpress/speculator.py, _jacobi_refine)."""

_TAKES_PARTS: Final = "TRITON_ATTN"
"""What takes parts of drafts on any GPU."""


def adaptive_problem(product: str, pair: Pair) -> PlanError | None:
    """Return why vLLM would not start with a pair on a GPU product because it is asked to adapt; None where it would.

    vllm/v1/worker/gpu/spec_decode/adaptive_verification.py raises after loading, about the target's layers alone.
    """
    if not pair.adaptive_verification:
        return None
    version, target = pair.limits.engine_version, pair.target
    rules = sizing_facts(version).get("adaptive_verification")
    if rules is None:
        return PlanError(FIELD, True, f"is of vLLM 0.28 and later, and this is {version}: remove it")
    if pair.draft is not None and pair.draft.architecture in _UNSURE_HEADS:
        return PlanError(FIELD, True, f"vLLM {version} does not ask {pair.draft.name} how sure it is: remove it")
    mixers = {type(mixer) for layer, _ in target.distinct_layers for mixer in layer.mixers}
    if {_STATES[kind] for kind in mixers & _STATES.keys()} - rules["states"].keys():
        message = f"vLLM {version} plans the states of {target.name} for whole drafts: remove it"
        return PlanError(FIELD, True, message)
    kernels = rules["attention"].get(generation_of(product))
    if kernels is None or not target.attentions:
        return None
    return _kernel_problem(product, pair, _fitting(target, kernels.keys()))


def adaptive_doubt(product: str, pair: Pair) -> str | None:
    """Return that it is not known whether a product has a kernel that takes parts of drafts; None where it is."""
    rules = sizing_facts(pair.limits.engine_version).get("adaptive_verification")
    if not pair.adaptive_verification or rules is None or not pair.target.attentions:
        return None
    if generation_of(product) in rules["attention"]:
        return None
    return (
        f"which attention kernels take parts of drafts on {product} was not read: vLLM may refuse {FIELD} when it"
        " starts"
    )


def _fitting(target: ModelGeometry, kernels: AbstractSet[str]) -> list[str]:
    is_latent = any(isinstance(mixer, LatentAttention) for mixer in target.attentions)
    return sorted(name for name in kernels if (_OF_LATENT in name) == is_latent)


def _kernel_problem(product: str, pair: Pair, fitting: list[str]) -> PlanError | None:
    """Return why the attention of a target would refuse it, where these kernels are left for it."""
    version, target, named = pair.limits.engine_version, pair.target, pair.limits.attention_backend
    if not fitting:
        message = f"vLLM {version} has no kernel on {product} that takes parts of drafts for {target.name}: remove it"
        return PlanError(FIELD, True, message)
    if named is not None and named not in fitting:
        known = ", ".join(fitting)
        message = f"with {FIELD} vLLM {version} refuses this attention backend on {product}: use one of {known}"
        return PlanError(BACKEND_FIELD, named, message)
    sinks = any(isinstance(mixer, SelfAttention) and mixer.sinks for mixer in target.attentions)
    if named is None and not sinks and _FIRST_CHOICE not in fitting:
        message = (
            f"on {product} vLLM {version} chooses {_FIRST_CHOICE}, which takes whole drafts alone: add"
            f" --attention-backend {_TAKES_PARTS} to {BACKEND_FIELD}, or remove it"
        )
        return PlanError(FIELD, True, message)
    return None
