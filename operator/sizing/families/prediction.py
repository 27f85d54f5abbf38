"""Layers for multi-token prediction (MTP): drafts that a target's own checkpoint holds."""

from dataclasses import replace
from typing import Final

from specdecode_operator.sizing.base.errors import PlanError
from specdecode_operator.sizing.base.fields import Fields
from specdecode_operator.sizing.model.checkpoint import read_checkpoint
from specdecode_operator.sizing.model.geometry import HeadParts, ModelGeometry, Tower
from specdecode_operator.sizing.model.layers import DenseMlp, LatentAttention, Layer, SelfAttention

_COUNT_KEYS: Final = ("num_nextn_predict_layers", "mtp_num_hidden_layers")

_ERNIE: Final = "Ernie4_5_Moe"

_FAMILIES: Final = ("DeepseekV3", "GlmMoeDsa", "Glm4Moe", "Qwen3Next", "Qwen3_5", "MiMo", "NemotronH", _ERNIE)
"""Targets for which vLLM 0.32 has such a draft (config/speculative.py, hf_config_override), by architecture."""

_ALWAYS_ONE: Final = "Qwen3Next"
"""Its files do not say how many modules they hold: one (vLLM, qwen3_next_mtp.py)."""

_MIMO_V2: Final = "MiMoV2"

_SPLIT_PROJECTION: Final = ("Qwen3Next", "Qwen3_5", "NemotronH")
"""Families with one projection for all modules, split over the ranks, and the norms once."""

_EMBEDDING_IMAGES: Final = "Qwen3_5"
"""The family whose class takes images (SupportsMultiModal); other drafts here see the placeholders alone."""


def with_prediction(model: ModelGeometry, fields: Fields) -> ModelGeometry:
    """Return the model with the modules for multi-token prediction that its checkpoint holds."""
    if not model.architecture.startswith(_FAMILIES):
        return model
    count = model.mtp_layers or _count(fields, model.architecture)
    if not count:
        return model
    return replace(model, mtp_layers=count, mtp_block=model.mtp_block or (_module(model, fields),))


def _count(fields: Fields, architecture: str) -> int:
    key = next((key for key in _COUNT_KEYS if fields.values.get(key)), None)
    if key is not None:
        return fields.size(key)
    return 1 if architecture.startswith(_ALWAYS_ONE) else 0


def _module(model: ModelGeometry, fields: Fields) -> Layer:
    """Return the layer of one module.

    Like the model's last one, but with an indexer of its own where attention
    is sparse. A quantized checkpoint names it after the last layer.
    """
    if model.architecture.startswith(_MIMO_V2):
        return _mimo_v2_module(model, fields)
    if model.architecture.startswith(_ERNIE):
        return _ernie_module(model, fields)
    attending = (layer for layer in reversed(model.layers) if isinstance(layer.mixer, SelfAttention | LatentAttention))
    layer = next(attending, None)
    if layer is None:
        raise fields.error(
            "num_hidden_layers",
            "none of these layers has attention, which a module for multi-token prediction takes after: copy it, and"
            " what says which layers have it, from the model's config.json",
        )
    mixer = layer.mixer
    if isinstance(mixer, LatentAttention) and mixer.sparse_tokens:
        attentions = (one for one in model.attentions if isinstance(one, LatentAttention))
        mixer = replace(mixer, indexer=next(one.indexer for one in attentions if one.indexer is not None))
    unquantized = read_checkpoint(fields).unquantized_prediction_modules(model.num_layers)
    return replace(layer, mixer=mixer, unquantized=unquantized)


def _mimo_v2_module(model: ModelGeometry, fields: Fields) -> Layer:
    """Return a layer with a window and a dense feed-forward, its output projection in 16 bits (mimo_v2_mtp.py)."""
    windowed = next((each for each in model.layers if _has_window(each)), None)
    dense = next((each for each in model.layers if isinstance(each.feed_forward, DenseMlp)), None)
    if windowed is None or dense is None:
        key, what = ("hybrid_layer_pattern", "a window") if windowed is None else ("moe_layer_freq", "no experts")
        raise fields.error(
            key, f"no layer has {what}, as its module for multi-token prediction has: copy it from the config.json"
        )
    return replace(windowed, feed_forward=dense.feed_forward, unquantized=frozenset({"self_attn.o_proj"}))


def _ernie_module(model: ModelGeometry, fields: Fields) -> Layer:
    """Return a layer with a dense feed-forward: a Llama layer of the model's sizes (vLLM, ernie_mtp.py)."""
    dense = next((each for each in model.layers if isinstance(each.feed_forward, DenseMlp)), None)
    if dense is None:
        raise fields.error(
            "moe_layer_start_index",
            "no layer is dense, as its module for multi-token prediction is: copy it from the config.json",
        )
    unquantized = read_checkpoint(fields).unquantized_prediction_modules(model.num_layers)
    return replace(dense, unquantized=unquantized)


def _has_window(layer: Layer) -> bool:
    return isinstance(layer.mixer, SelfAttention) and bool(layer.mixer.window_tokens)


def mtp_head(target: ModelGeometry) -> ModelGeometry:
    """Return the draft that a target's modules for multi-token prediction make.

    Each is a layer behind a projection of token and hidden state (vLLM,
    deepseek_mtp.py, mimo_mtp.py, qwen3_next_mtp.py, nemotron_h_mtp.py, ernie_mtp.py).
    Embedding and output head are built and then replaced by the target's.

    Raises
    ------
    PlanError
        When the checkpoint holds none, or the engine cannot use them.
    """
    if not target.mtp_block:
        message = (
            f"the checkpoint of {target.name} has no layers for multi-token prediction that vLLM can draft with; use "
            "eagle3 or draft_model with a draft, or ngram"
        )
        raise PlanError("speculation.method", "mtp", message)
    return replace(
        target,
        name=f"MTP layers of {target.name}",
        layers=target.mtp_block * target.mtp_layers,
        layer_scale=target.layer_scale if target.mtp_scale == (1, 1) else target.mtp_scale,
        ropes=(),
        tower=Tower(),
        mtp_layers=0,
        mtp_block=(),
        tie_word_embeddings=True,
        final_norms=0,
        head=_head_parts(target),
    )


def _head_parts(target: ModelGeometry) -> HeadParts:
    """Return what lies around the layers: projections, norms and output heads."""
    size, count = target.hidden_size, target.mtp_layers
    # Norms of both inputs, and the one before the output head, which ERNIE's class does without.
    projection, norms = 2 * size * size, (2 if target.architecture.startswith(_ERNIE) else 3) * size
    once = target.architecture.startswith(_SPLIT_PROJECTION)
    return HeadParts(
        output_rows=target.vocab_size,
        output_heads=1 if once else count,
        shares_embedding=True,
        shares_output=True,
        shares_on_last_stage=False,
        whole_elements=norms if once else count * (projection + norms),
        split_elements=projection if once else 0,
        embeds_images=target.architecture.startswith(_EMBEDDING_IMAGES) and bool(target.tower.item_tokens),
    )
