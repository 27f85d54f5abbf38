"""Encoders in front of language models: their parameters, and which of them are split over ranks.

Counts follow vLLM's classes: projections are split over the ranks; embeddings, norms, biases of row-parallel layers
and projectors are replicated.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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

_CLIP: Final = "clip_vision_model"


@dataclass(frozen=True)
class _Vision:
    """Sizes that all vision encoders have."""

    hidden: int
    intermediate: int
    layers: int
    patch: int


def siglip_for_gemma3(fields: Fields) -> Tower:
    """SigLIP and the projection of Gemma 3 (vLLM, siglip.py and gemma3_mm.py)."""
    size = _read(fields)
    tower = _siglip(size, _section(fields), layers=size.layers)
    text = fields.size("hidden_size")
    projector = size.hidden + size.hidden * text
    side = _section(fields).size("image_size")
    return Tower(
        tower.split_elements,
        tower.whole_elements + projector,
        item_tokens=fields.size("mm_tokens_per_image", default=256),
        whole_items=True,
        item_elements=_RGB * side**2,
        item_state_elements=_states(size.hidden, (side // size.patch) ** 2),
        item_inner_elements=_rows(size.intermediate, (side // size.patch) ** 2),
    )


def siglip_for_llava_next(fields: Fields) -> Tower:
    """SigLIP or CLIP of LLaVA-NeXT up to the last layer it reads, a projector of two, the newline (llava_next.py)."""
    size = _read(fields)
    wanted = fields.values.get("vision_feature_layer")
    features = list(wanted) if isinstance(wanted, list | tuple) else [wanted if isinstance(wanted, int) else -1]
    deepest = max(size.layers + layer + 1 if layer < 0 else layer for layer in features)
    # The post-layernorm is only there when every layer is.
    tower = _siglip(size, _section(fields), layers=deepest, post_norm=len(features) == 1 and deepest == size.layers)
    text = fields.size("hidden_size")
    split = tower.split_elements + size.hidden * len(features) * text + text + text * text
    side = _section(fields).size("image_size")
    tiles = _LLAVA_NEXT_TILES
    return Tower(
        split,
        tower.whole_elements + text + text,
        item_tokens=tiles * (side // size.patch) ** 2,
        item_elements=tiles * _RGB * side**2,
        item_state_elements=_states(size.hidden, tiles * (side // size.patch) ** 2),
        item_inner_elements=_rows(size.intermediate, tiles * (side // size.patch) ** 2),
    )


def pixtral_for_mistral3(fields: Fields) -> Tower:
    """Pixtral, patch merger and projector of Mistral Small 3.1 (vLLM, pixtral.py and mistral3.py)."""
    size = _read(fields)
    text = fields.size("hidden_size")
    merge = fields.size("spatial_merge_size", default=2)
    attention = 4 * size.hidden * size.hidden
    feed_forward = 3 * size.hidden * size.intermediate
    split = size.layers * (attention + feed_forward) + size.hidden * text + text * text
    norms = size.layers * 2 * size.hidden + size.hidden + size.hidden
    patches = size.hidden * _RGB * size.patch**2
    merger = size.hidden * size.hidden * merge**2
    bias = 2 * text if fields.flag("multimodal_projector_bias") else 0
    side = _section(fields).size("image_size")
    return Tower(
        split,
        norms + patches + merger + bias,
        item_tokens=(side // (size.patch * merge)) ** 2,
        item_elements=_RGB * side**2,
        item_state_elements=_states(size.hidden, (side // size.patch) ** 2),
        item_inner_elements=_rows(size.intermediate, (side // size.patch) ** 2, gated=True),
    )


def moonvit_for_kimi(fields: Fields) -> Tower:
    """MoonViT and the projector of Kimi-VL (vLLM, moonvit.py and kimi_vl.py)."""
    size = _read(fields)
    section = _section(fields)
    text = fields.size("hidden_size")
    split = size.layers * (
        4 * size.hidden * size.hidden + 3 * size.hidden + 2 * size.hidden * size.intermediate + size.intermediate
    )
    whole = size.layers * (2 * size.hidden + 4 * size.hidden)
    positions = section.size("init_pos_emb_height") * section.size("init_pos_emb_width") * size.hidden
    patches = size.hidden * _RGB * size.patch**2 + size.hidden
    merged = size.hidden * 4
    projector = 2 * size.hidden + merged * merged + merged + merged * text + text
    patch_count = (_MOONVIT_SIDE // size.patch) ** 2
    return Tower(
        split,
        whole + positions + patches + 2 * size.hidden + projector,
        item_tokens=patch_count // 4,
        item_elements=patch_count * _RGB * size.patch**2,
        item_state_elements=_states(size.hidden, patch_count),
        item_inner_elements=_rows(size.intermediate, patch_count),
        table_bytes=_MOONVIT_TABLE_ROWS**2 * (size.hidden // section.size("num_attention_heads") // 2) * 8,
    )


def moonvit_for_kimi_k25(fields: Fields) -> Tower:
    """MoonViT for images and video, and the projector of Kimi K2.5 (vLLM, kimi_k25_vit.py and kimi_k25.py)."""
    section = _section(fields)
    hidden, inner = section.size("vt_hidden_size"), section.size("vt_intermediate_size")
    layers, patch = section.size("vt_num_hidden_layers"), section.size("patch_size")
    text = fields.size("hidden_size")
    split = layers * (4 * hidden * hidden + 3 * hidden + 2 * hidden * inner + inner)
    # Biases of the two row-split layers and both norms with their biases.
    whole = layers * (2 * hidden + 4 * hidden)
    positions = section.size("init_pos_emb_height") * section.size("init_pos_emb_width") * hidden
    patches = hidden * _RGB * patch**2 + hidden
    merged = hidden * _MERGED_PATCHES
    projector = 2 * hidden + merged * merged + merged + merged * text + text
    return Tower(split, whole + positions + patches + 2 * hidden + projector)


def llama4_vision(fields: Fields) -> Tower:
    """The vision model and projector of Llama 4 (vLLM, mllama4.py)."""
    size = _read(fields)
    section = _section(fields)
    text = fields.size("hidden_size")
    ratio = section.number("pixel_shuffle_ratio", default=0.5)
    shuffled = round(size.hidden / ratio**2)
    inner = section.size("projector_input_dim")
    output = section.size("projector_output_dim")
    split = size.layers * (
        4 * size.hidden * size.hidden + 3 * size.hidden + 2 * size.hidden * size.intermediate + size.intermediate
    )
    split += shuffled * inner + inner * output + size.hidden * _RGB * size.patch**2
    grid = section.size("image_size") // size.patch
    positions = grid**2 + 1
    whole = size.layers * (2 * size.hidden + 4 * size.hidden)
    whole += size.hidden + positions * size.hidden + 4 * size.hidden
    head_dim = size.hidden // section.size("num_attention_heads")
    vision_output = section.size("vision_output_dim")
    split += vision_output * text
    tile_tokens = round(grid**2 * ratio**2)
    return Tower(
        split,
        whole,
        item_tokens=_LLAMA4_TILES * tile_tokens,
        item_elements=_LLAMA4_TILES * _RGB * section.size("image_size") ** 2,
        item_state_elements=_states(size.hidden, _LLAMA4_TILES * grid**2),
        item_inner_elements=_rows(size.intermediate, _LLAMA4_TILES * grid**2),
        # One complex number for each pair of a head (vLLM, llama4_vision_rope.py).
        ropes=(RopeTable(head_dim, head_dim // 2, positions, (("rope_type", '"llama4_vision"'),), _COMPLEX_BYTES),),
    )


def qwen_vl(fields: Fields) -> Tower:
    """The vision model of Qwen2-VL and Qwen2.5-VL with its merger (vLLM, qwen2_vl.py and qwen2_5_vl.py)."""
    section = _section(fields)
    # Qwen2-VL names the width embed_dim and the language model's width hidden_size.
    named_embed = section.is_set("embed_dim")
    hidden = section.size("embed_dim" if named_embed else "hidden_size")
    layers = section.size("depth")
    inner = section.size("intermediate_size", default=4 * hidden)
    text = fields.size("hidden_size")
    merged = hidden * section.size("spatial_merge_size", default=2) ** 2
    gated = section.is_set("intermediate_size")
    split = layers * (
        4 * hidden * hidden + 3 * hidden + (3 if gated else 2) * hidden * inner + (2 if gated else 1) * inner
    )
    norm = hidden if gated else 2 * hidden
    whole = layers * (2 * norm + hidden + hidden)
    temporal = section.size("temporal_patch_size", default=2)
    patch_elements = section.size("in_channels", default=_RGB) * temporal * section.size("patch_size") ** 2
    merger = merged * merged + merged + merged * text
    patch_count = _QWEN_IMAGE_TOKENS * section.size("spatial_merge_size", default=2) ** 2
    return Tower(
        split + merger,
        whole + hidden * patch_elements + norm + text,
        item_tokens=_QWEN_IMAGE_TOKENS,
        item_elements=patch_count * patch_elements,
        item_state_elements=_states(hidden, patch_count),
        item_inner_elements=_rows(inner, patch_count, gated=gated),
        longest_item=_QWEN_VIDEO_IMAGES,
        ropes=(_vision_rope(hidden // section.size("num_heads") // 2),),
    )


def qwen3_vl(fields: Fields) -> Tower:
    """The vision model of Qwen3-VL and Qwen3.5, with a merger for each level it hands on (vLLM, qwen3_vl.py)."""
    section = _section(fields)
    hidden, inner = section.size("hidden_size"), section.size("intermediate_size")
    layers = section.size("depth")
    split = layers * (4 * hidden * hidden + 3 * hidden + 2 * hidden * inner + inner)
    # Biases of the two row-split layers and both norms with their biases.
    whole = layers * (2 * hidden + 4 * hidden)
    temporal = section.size("temporal_patch_size", default=2)
    patch_elements = section.size("in_channels", default=_RGB) * temporal * section.size("patch_size") ** 2
    positions = section.size("num_position_embeddings") * hidden
    merged = hidden * section.size("spatial_merge_size", default=2) ** 2
    text = section.size("out_hidden_size", default=fields.size("hidden_size"))
    levels = section.values.get("deepstack_visual_indexes") or ()
    deeper = len(levels) if isinstance(levels, list | tuple) else 0
    split += (1 + deeper) * (merged * merged + merged + merged * text)
    # The last merger norms before it merges, the others after.
    norms = 2 * hidden + deeper * 2 * merged
    rope_width = hidden // section.size("num_heads") // 2
    patch_count = _QWEN_IMAGE_TOKENS * section.size("spatial_merge_size", default=2) ** 2
    return Tower(
        split,
        whole + hidden * patch_elements + hidden + positions + norms + (1 + deeper) * text,
        item_tokens=_QWEN_IMAGE_TOKENS,
        item_elements=patch_count * patch_elements,
        item_state_elements=_states(hidden, patch_count),
        item_inner_elements=_rows(inner, patch_count),
        output_levels=1 + deeper,
        ropes=(_vision_rope(rope_width),),
    )


def internvl(fields: Fields) -> Tower:
    """InternViT with its projector (vLLM, interns1_vit.py and interns1.py): only its feed-forward layers are split."""
    section = _section(fields)
    hidden, inner = section.size("hidden_size"), section.size("intermediate_size")
    layers, patch, side = section.size("num_hidden_layers"), _side(section, "patch_size"), _side(section, "image_size")
    text = fields.size("hidden_size")
    norm = hidden * (1 if section.text("norm_type", default="layer_norm") == "rms_norm" else 2)
    attention = 4 * hidden * hidden + hidden + 3 * hidden * section.flag("attention_bias")
    norms = 2 * norm + 2 * hidden * section.flag("use_qk_norm") + 2 * hidden
    whole = layers * (attention + hidden + norms)
    patches = hidden * _RGB * patch**2 + hidden
    positions = ((side // patch) ** 2 + 2) * hidden
    merged = round(hidden / fields.number("downsample_ratio", default=0.5) ** 2)
    projector = 2 * merged + merged * text + text + text * text + text
    return Tower(layers * (2 * hidden * inner + inner), whole + patches + positions + projector)


def _side(section: Fields, key: str) -> int:
    """Return a length that files write once, or once for each direction."""
    value = section.values.get(key)
    return section.having({key: value[0]}).size(key) if isinstance(value, list) and value else section.size(key)


def gemma4_vision(fields: Fields) -> Tower:
    """The vision model and projection of Gemma 4, whole on every rank (vLLM, gemma4_mm.py builds transformers')."""
    if fields.section("audio_config") is not None:
        raise fields.unmodelled("audio_config", "sizing lacks the audio tower of Gemma 4")
    size = _read(fields)
    section = _section(fields)
    heads, kv_heads = section.size("num_attention_heads"), section.size("num_key_value_heads")
    width = section.size("head_dim")
    attention = (2 * heads + 2 * kv_heads) * width * size.hidden + 2 * width
    layer = attention + 3 * size.hidden * size.intermediate + 4 * size.hidden
    patches = size.hidden * _RGB * size.patch**2
    positions = 2 * section.size("position_embedding_size") * size.hidden
    # Frames are encoded one by one, so the peak of one is not worth counting.
    frame = _GEMMA4_FRAME_TOKENS * section.size("pooling_kernel_size", default=3) ** 2 * _RGB * size.patch**2
    return Tower(
        whole_elements=size.layers * layer + patches + positions + size.hidden * fields.size("hidden_size"),
        item_tokens=_GEMMA4_FRAMES * (_GEMMA4_FRAME_TOKENS + _GEMMA4_FRAME_MARKS),
        item_elements=_GEMMA4_FRAMES * frame,
        # vllm/transformers_utils/model_arch_config_convertor.py, Gemma4ModelArchConfigConvertor.
        whole_items=fields.text("use_bidirectional_attention", default="") == "vision",
    )


def _states(width: int, patches: int) -> int:
    """Return residual and normed input of all patches: what stands beside the widest layer of an encoder."""
    return 2 * width * patches


def _rows(inner: int, patches: int, *, gated: bool = False) -> int:
    """Return what its feed-forward layer makes of them: before and after the activation, and a gate."""
    return (3 if gated else 2) * inner * patches


def _vision_rope(width: int) -> RopeTable:
    return RopeTable(2 * width, width, _QWEN_VISION_POSITIONS, (("rope_type", '"qwen_vision"'),))


def _siglip(size: _Vision, section: Fields, *, layers: int, post_norm: bool = True) -> Tower:
    split = layers * (
        4 * size.hidden * size.hidden + 3 * size.hidden + 2 * size.hidden * size.intermediate + size.intermediate
    )
    # Biases of the two row-split layers and both norms with their biases.
    whole = layers * (2 * size.hidden + 4 * size.hidden)
    patches = size.hidden * _RGB * size.patch**2 + size.hidden
    positions = (section.size("image_size") // size.patch) ** 2 * size.hidden
    if section.text("model_type", default="") == _CLIP:
        # A class token with a position and a norm before the layers, but no bias of the patches (vLLM, clip.py).
        whole += 3 * size.hidden
    return Tower(split, whole + positions + patches + (2 * size.hidden if post_norm else 0))


def _read(fields: Fields) -> _Vision:
    section = _section(fields)
    return _Vision(
        hidden=section.size("hidden_size"),
        intermediate=section.size("intermediate_size"),
        layers=section.size("num_hidden_layers"),
        patch=section.size("patch_size"),
    )


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
"""Encoders by architecture; those of other wrappers are not known."""
