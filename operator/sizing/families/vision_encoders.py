"""Encoders in front of language models: their parameters, and which of them are split over ranks.

Counts follow vLLM's classes: projections are split over the ranks; embeddings, norms, biases of row-parallel layers
and projectors are replicated. While an image is encoded, each patch takes the residual and its normed copy
(``item_state_elements``), and the inputs and outputs of the activation, with a gate (``item_inner_elements``).
"""

from collections.abc import Callable, Mapping
from typing import Final

from specdecode_operator.sizing.config_fields import Fields
from specdecode_operator.sizing.geometry import RopeTable, Tower

_RGB: Final = 3

_LLAMA4_TILES: Final = 17
"""Sixteen tiles and the whole image (vLLM, mllama4.py, max_patches)."""

_LLAVA_NEXT_TILES: Final = 11
"""Ten tiles and the whole image at the largest grid."""

_MERGED_PATCHES: Final = 4
"""Patches that MoonViT merges to one token: two by two (merge_kernel_size)."""

_COMPLEX_BYTES: Final = 8

_MOONVIT_SIDE: Final = 924
"""Side of the largest image in pixels: 4096 patches at most, padded to 28."""

_MOONVIT_TABLE_ROWS: Final = 512
"""Rows and columns of its table of rotary positions (vLLM, moonvit.py, Rope2DPosEmb)."""

_QWEN_IMAGE_TOKENS: Final = 16_384
"""Of the largest image (preprocessor_config.json): 12,845,056 pixels by 28 x 28; of Qwen3-VL 16,777,216 by 32 x 32."""

_QWEN_VIDEO_IMAGES: Final = 7
"""As many images at most is the longest video: 14 frames, two a patch (vLLM, qwen2_vl.py, _MAX_FRAMES_PER_VIDEO)."""

_GEMMA4_FRAMES: Final = 32
_GEMMA4_FRAME_TOKENS: Final = 70
_GEMMA4_FRAME_MARKS: Final = 8
"""Frames of the longest video, tokens of each, and those around it (vLLM, gemma4_mm.py, get_mm_max_tokens_per_item)."""

_QWEN_VISION_POSITIONS: Final = 8192
"""Rows of the rotary table of Qwen's encoders (vLLM, qwen2_vl.py, qwen3_vl.py)."""


def siglip_for_gemma3(fields: Fields) -> Tower:
    """SigLIP and the projection of Gemma 3 (vLLM, siglip.py and gemma3_mm.py)."""
    section = _section(fields)
    hidden, inner, layers, patch = _sizes(section)
    split, whole = _siglip(section, layers)
    projector = hidden + hidden * fields.size("hidden_size")
    side = section.size("image_size")
    patches = (side // patch) ** 2
    return Tower(
        split,
        whole + projector,
        item_tokens=fields.size("mm_tokens_per_image", default=256),
        whole_items=True,
        item_elements=_RGB * side**2,
        item_state_elements=2 * hidden * patches,
        item_inner_elements=2 * inner * patches,
    )


def siglip_for_llava_next(fields: Fields) -> Tower:
    """SigLIP or CLIP of LLaVA-NeXT up to the last layer it reads, a projector of two, the newline (llava_next.py)."""
    section = _section(fields)
    hidden, inner, layers, patch = _sizes(section)
    wanted = fields.values.get("vision_feature_layer")
    features = list(wanted) if isinstance(wanted, list | tuple) else [wanted if isinstance(wanted, int) else -1]
    deepest = max(layers + layer + 1 if layer < 0 else layer for layer in features)
    # The post-layernorm is only there when every layer is.
    split, whole = _siglip(section, deepest, post_norm=len(features) == 1 and deepest == layers)
    text, side = fields.size("hidden_size"), section.size("image_size")
    patches = _LLAVA_NEXT_TILES * (side // patch) ** 2
    return Tower(
        split + hidden * len(features) * text + text + text * text,
        whole + text + text,
        item_tokens=patches,
        item_elements=_LLAVA_NEXT_TILES * _RGB * side**2,
        item_state_elements=2 * hidden * patches,
        item_inner_elements=2 * inner * patches,
    )


def pixtral_for_mistral3(fields: Fields) -> Tower:
    """Pixtral, patch merger and projector of Mistral Small 3.1 (vLLM, pixtral.py and mistral3.py)."""
    section = _section(fields)
    hidden, inner, layers, patch = _sizes(section)
    text = fields.size("hidden_size")
    merge = fields.size("spatial_merge_size", default=2)
    split = layers * (4 * hidden * hidden + 3 * hidden * inner) + hidden * text + text * text
    norms = (2 * layers + 2) * hidden
    merger = hidden * hidden * merge**2
    bias = 2 * text if fields.flag("multimodal_projector_bias") else 0
    side = section.size("image_size")
    patches = (side // patch) ** 2
    return Tower(
        split,
        norms + hidden * _RGB * patch**2 + merger + bias,
        item_tokens=(side // (patch * merge)) ** 2,
        item_elements=_RGB * side**2,
        item_state_elements=2 * hidden * patches,
        item_inner_elements=3 * inner * patches,
    )


def moonvit_for_kimi(fields: Fields) -> Tower:
    """MoonViT and the projector of Kimi-VL (vLLM, moonvit.py and kimi_vl.py)."""
    section = _section(fields)
    hidden, inner, layers, patch = _sizes(section)
    split, whole = _moonvit(section, hidden, inner, layers, patch)
    merged, text = hidden * _MERGED_PATCHES, fields.size("hidden_size")
    patches = (_MOONVIT_SIDE // patch) ** 2
    return Tower(
        split,
        whole + merged * merged + merged + merged * text + text,
        item_tokens=patches // _MERGED_PATCHES,
        item_elements=patches * _RGB * patch**2,
        item_state_elements=2 * hidden * patches,
        item_inner_elements=2 * inner * patches,
        table_bytes=_MOONVIT_TABLE_ROWS**2 * (hidden // section.size("num_attention_heads") // 2) * _COMPLEX_BYTES,
    )


def moonvit_for_kimi_k25(fields: Fields) -> Tower:
    """MoonViT for images and video, and the projector of Kimi K2.5 (vLLM, kimi_k25_vit.py and kimi_k25.py)."""
    section = _section(fields)
    keys = ("vt_hidden_size", "vt_intermediate_size", "vt_num_hidden_layers", "patch_size")
    hidden, inner, layers, patch = _sizes(section, keys)
    split, whole = _moonvit(section, hidden, inner, layers, patch)
    merged, text = hidden * _MERGED_PATCHES, fields.size("hidden_size")
    return Tower(split, whole + merged * merged + merged + merged * text + text)


def _moonvit(section: Fields, hidden: int, inner: int, layers: int, patch: int) -> tuple[int, int]:
    """Return split and whole elements of MoonViT, with the final norm and the norm of its projector."""
    split, whole = _layers(layers, hidden, inner)
    positions = section.size("init_pos_emb_height") * section.size("init_pos_emb_width") * hidden
    return split, whole + positions + hidden * _RGB * patch**2 + hidden + 4 * hidden


def llama4_vision(fields: Fields) -> Tower:
    """The vision model and projector of Llama 4 (vLLM, mllama4.py)."""
    section = _section(fields)
    hidden, inner, layers, patch = _sizes(section)
    text = fields.size("hidden_size")
    ratio = section.number("pixel_shuffle_ratio", default=0.5)
    shuffled = round(hidden / ratio**2)
    projected, output = _sizes(section, ("projector_input_dim", "projector_output_dim"))
    split, whole = _layers(layers, hidden, inner)
    split += shuffled * projected + projected * output + hidden * _RGB * patch**2
    side = section.size("image_size")
    patches = (side // patch) ** 2
    positions = patches + 1
    head_dim = hidden // section.size("num_attention_heads")
    split += section.size("vision_output_dim") * text
    return Tower(
        split,
        whole + hidden + positions * hidden + 4 * hidden,
        item_tokens=_LLAMA4_TILES * round(patches * ratio**2),
        item_elements=_LLAMA4_TILES * _RGB * side**2,
        item_state_elements=2 * hidden * _LLAMA4_TILES * patches,
        item_inner_elements=2 * inner * _LLAMA4_TILES * patches,
        # One complex number for each pair of a head (vLLM, llama4_vision_rope.py).
        ropes=(RopeTable(head_dim, head_dim // 2, positions, (("rope_type", '"llama4_vision"'),), _COMPLEX_BYTES),),
    )


def qwen_vl(fields: Fields) -> Tower:
    """The vision model of Qwen2-VL and Qwen2.5-VL with its merger (vLLM, qwen2_vl.py and qwen2_5_vl.py)."""
    section = _section(fields)
    # Qwen2-VL names the width embed_dim and the language model's width hidden_size.
    hidden = section.size("embed_dim" if section.is_set("embed_dim") else "hidden_size")
    layers = section.size("depth")
    inner, gated = section.size("intermediate_size", default=4 * hidden), section.is_set("intermediate_size")
    text = fields.size("hidden_size")
    merge = section.size("spatial_merge_size", default=2)
    merged = hidden * merge**2
    widening = 2 if gated else 1  # Gate and up, or up alone
    norm = hidden if gated else 2 * hidden
    split = layers * (4 * hidden * hidden + 3 * hidden + (widening + 1) * hidden * inner + widening * inner)
    temporal = section.size("temporal_patch_size", default=2)
    patch_elements = section.size("in_channels", default=_RGB) * temporal * section.size("patch_size") ** 2
    patches = _QWEN_IMAGE_TOKENS * merge**2
    return Tower(
        split + merged * merged + merged + merged * text,
        layers * (2 * norm + 2 * hidden) + hidden * patch_elements + norm + text,
        item_tokens=_QWEN_IMAGE_TOKENS,
        item_elements=patches * patch_elements,
        item_state_elements=2 * hidden * patches,
        item_inner_elements=(widening + 1) * inner * patches,
        longest_item=_QWEN_VIDEO_IMAGES,
        ropes=(_qwen_rope(section, hidden),),
    )


def qwen3_vl(fields: Fields) -> Tower:
    """The vision model of Qwen3-VL and Qwen3.5, with a merger for each level it hands on (vLLM, qwen3_vl.py)."""
    section = _section(fields)
    hidden, inner, layers = _sizes(section, ("hidden_size", "intermediate_size", "depth"))
    split, whole = _layers(layers, hidden, inner)
    temporal = section.size("temporal_patch_size", default=2)
    patch_elements = section.size("in_channels", default=_RGB) * temporal * section.size("patch_size") ** 2
    positions = section.size("num_position_embeddings") * hidden
    merge = section.size("spatial_merge_size", default=2)
    merged = hidden * merge**2
    text = section.size("out_hidden_size", default=fields.size("hidden_size"))
    indexes = section.values.get("deepstack_visual_indexes") or ()
    levels = 1 + (len(indexes) if isinstance(indexes, list | tuple) else 0)
    # The last merger norms before it merges, the others after.
    norms = 2 * hidden + (levels - 1) * 2 * merged
    patches = _QWEN_IMAGE_TOKENS * merge**2
    return Tower(
        split + levels * (merged * merged + merged + merged * text),
        whole + hidden * patch_elements + hidden + positions + norms + levels * text,
        item_tokens=_QWEN_IMAGE_TOKENS,
        item_elements=patches * patch_elements,
        item_state_elements=2 * hidden * patches,
        item_inner_elements=2 * inner * patches,
        output_levels=levels,
        ropes=(_qwen_rope(section, hidden),),
    )


def internvl(fields: Fields) -> Tower:
    """InternViT with its projector (vLLM, interns1_vit.py and interns1.py): only its feed-forward layers are split."""
    section = _section(fields)
    hidden, inner, layers = _sizes(section, ("hidden_size", "intermediate_size", "num_hidden_layers"))
    patch, side = _side(section, "patch_size"), _side(section, "image_size")
    text = fields.size("hidden_size")
    norm = hidden * (1 if section.text("norm_type", default="layer_norm") == "rms_norm" else 2)
    attention = 4 * hidden * hidden + hidden + 3 * hidden * section.flag("attention_bias")
    norms = 2 * norm + 2 * hidden * section.flag("use_qk_norm") + 2 * hidden
    whole = layers * (attention + hidden + norms) + hidden * _RGB * patch**2 + hidden
    positions = ((side // patch) ** 2 + 2) * hidden
    merged = round(hidden / fields.number("downsample_ratio", default=0.5) ** 2)
    projector = 2 * merged + merged * text + text + text * text + text
    return Tower(layers * (2 * hidden * inner + inner), whole + positions + projector)


def _side(section: Fields, key: str) -> int:
    """Return a length that files write once, or once for each direction."""
    value = section.values.get(key)
    return section.having({key: value[0]}).size(key) if isinstance(value, list) and value else section.size(key)


def gemma4_vision(fields: Fields) -> Tower:
    """The vision model and projection of Gemma 4, whole on every rank (vLLM, gemma4_mm.py builds transformers')."""
    if fields.section("audio_config") is not None:
        raise fields.unmodelled("audio_config", "sizing lacks the audio tower of Gemma 4")
    section = _section(fields)
    hidden, inner, layers, patch = _sizes(section)
    heads, kv_heads, width = _sizes(section, ("num_attention_heads", "num_key_value_heads", "head_dim"))
    attention = (2 * heads + 2 * kv_heads) * width * hidden + 2 * width
    layer = attention + 3 * hidden * inner + 4 * hidden
    positions = 2 * section.size("position_embedding_size") * hidden
    # Frames are encoded one by one, so the peak of one is not worth counting.
    frame = _GEMMA4_FRAME_TOKENS * section.size("pooling_kernel_size", default=3) ** 2 * _RGB * patch**2
    return Tower(
        whole_elements=layers * layer + hidden * _RGB * patch**2 + positions + hidden * fields.size("hidden_size"),
        item_tokens=_GEMMA4_FRAMES * (_GEMMA4_FRAME_TOKENS + _GEMMA4_FRAME_MARKS),
        item_elements=_GEMMA4_FRAMES * frame,
        # vllm/transformers_utils/model_arch_config_convertor.py, Gemma4ModelArchConfigConvertor.
        whole_items=fields.text("use_bidirectional_attention", default="") == "vision",
    )


def _qwen_rope(section: Fields, hidden: int) -> RopeTable:
    width = hidden // section.size("num_heads") // 2
    return RopeTable(2 * width, width, _QWEN_VISION_POSITIONS, (("rope_type", '"qwen_vision"'),))


def _siglip(section: Fields, layers: int, *, post_norm: bool = True) -> tuple[int, int]:
    """Return split and whole elements of SigLIP, or of CLIP, cut off after a number of layers."""
    hidden, inner, _, patch = _sizes(section)
    split, whole = _layers(layers, hidden, inner)
    whole += hidden * _RGB * patch**2 + hidden + (section.size("image_size") // patch) ** 2 * hidden
    if section.text("model_type", default="") == "clip_vision_model":
        # A class token with a position and a norm before the layers, but no bias of the patches (vLLM, clip.py).
        whole += 3 * hidden
    return split, whole + 2 * hidden * post_norm


def _layers(count: int, hidden: int, inner: int) -> tuple[int, int]:
    """Return split and whole elements of layers: whole are the biases of the row-split halves, and two LayerNorms."""
    return count * (4 * hidden * hidden + 3 * hidden + 2 * hidden * inner + inner), count * 6 * hidden


_USUAL_SIZES: Final = ("hidden_size", "intermediate_size", "num_hidden_layers", "patch_size")


def _sizes(section: Fields, keys: tuple[str, ...] = _USUAL_SIZES) -> tuple[int, ...]:
    return tuple(section.size(key) for key in keys)


def _section(fields: Fields) -> Fields:
    section = fields.section("vision_config")
    if section is None:
        raise fields.error("vision_config", "is missing; copy it from the model's config.json")
    return section


TOWERS: Final[Mapping[str, Callable[[Fields], Tower]]] = {
    "Gemma3ForConditionalGeneration": siglip_for_gemma3,
    "LlavaNextForConditionalGeneration": siglip_for_llava_next,
    "Mistral3ForConditionalGeneration": pixtral_for_mistral3,
    "KimiVLForConditionalGeneration": moonvit_for_kimi,
    "KimiK25ForConditionalGeneration": moonvit_for_kimi_k25,
    "Llama4ForConditionalGeneration": llama4_vision,
    "Qwen2VLForConditionalGeneration": qwen_vl,
    "Qwen2_5_VLForConditionalGeneration": qwen_vl,
    "Qwen3VLForConditionalGeneration": qwen3_vl,
    "Qwen3VLMoeForConditionalGeneration": qwen3_vl,
    "Qwen3_5ForConditionalGeneration": qwen3_vl,
    "Qwen3_5MoeForConditionalGeneration": qwen3_vl,
    "Gemma4ForConditionalGeneration": gemma4_vision,
    "InternVLForConditionalGeneration": internvl,
}
"""Encoders by architecture; encoders of other wrappers are not known."""
