"""Estimated geometries: models whose class sizing does not implement, from keys that most config.json files share.

Where files differ in what they leave out, the larger reading is taken: no window, as many key/value heads as query
heads, an output head of its own. Layers are scaled to the bytes in the files if their headers were read.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from specdecode_operator.sizing.base.errors import GeometryError, UnmodelledError
from specdecode_operator.sizing.base.fields import MAX_TOKENS, Fields
from specdecode_operator.sizing.estimated.attention import attention_doubts, kinds, mixers
from specdecode_operator.sizing.estimated.feed_forward import expert_doubts, feed_forwards
from specdecode_operator.sizing.estimated.keys import LENGTH, VOCABULARY, WIDTH, number, required, settled
from specdecode_operator.sizing.families.decoder import Decoder, assemble, model_rope
from specdecode_operator.sizing.families.heads import TOKEN_ID_BYTES
from specdecode_operator.sizing.model.checkpoint import in_16_bits_for_prediction, read_checkpoint
from specdecode_operator.sizing.model.geometry import HeadParts, ModelGeometry, Tower
from specdecode_operator.sizing.model.precision import DEFAULT_FORMATS, WeightFormat
from specdecode_operator.sizing.model.rope import RopeTable
from specdecode_operator.sizing.model.stored import StoredWeights
from specdecode_operator.sizing.weights.checkpoint_bytes import expected_file_bytes
from specdecode_operator.sizing.weights.rank_layers import Split
from specdecode_operator.sizing.weights.stages import whole_model
from specdecode_operator.sizing.weights.weights import weight_parts
from specdecode_operator.vocabulary import Knowledge, Method, Precision

_INNER: Final = (
    *("thinker_config", "text_config", "llm_config", "language_config", "text_model_config"),
    *("language_model_config", "transformer_layer_config"),
)
"""Sections that hold the language model."""

_TOWER_SECTIONS: Final = ("vision_config", "vision_tower_config", "visual", "vision", "audio_config", "sound_config")
_TOWER_LAYERS: Final = ("num_hidden_layers", "depth", "encoder_layers", "num_layers", "n_layers", "layers", "n_layer")
_TOWER_WIDTH: Final = ("hidden_size", "embed_dim", "d_model", "width", "n_embd", "dim")
_TOWER_INNER: Final = ("intermediate_size", "encoder_ffn_dim", "ffn_dim", "mlp_dim")
_TOWER_WIDENS: Final = 4
_TOWER_PROJECTIONS: Final = 3
"""Encoders and the sizes in them; feed-forward layers are counted with a gate."""

_PREDICTS: Final = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "num_mtp_modules")
_MORE_IN_FILES_PERCENT: Final = 5
"""By how much files may exceed what a config.json describes before the plan counts the files."""

MORE_IN_FILES: Final = "weights"
"""Why a model of a known class is estimated: what `ModelGeometry.estimated_because` says of `as_in_files`."""

SCALE_TOLERANCE_PERCENT: Final = 25
"""How far the layers in the files may be from those that a config.json describes before a plan warns.

By config.json alone, `estimated_geometry` finds the layers of the 301 exact models of the catalogue within 3 % for 299,
and within 7 % for 300.
"""

_NORMS: Final = 2
_AUXILIARY_STATES: Final = 3


def estimated_geometry(
    fields: Fields, architecture: str, because: UnmodelledError, stored: StoredWeights | None, tower: Tower | None
) -> ModelGeometry:
    """Return the geometry of a model that sizing does not implement.

    Parameters
    ----------
    fields
        Its config.json, whole.
    because
        What sizing does not implement.
    stored
        What the headers of its files say; None if they were not read.
    tower
        Its encoder if sizing implements that; None to estimate it.

    Raises
    ------
    GeometryError
        If a size is missing, of the wrong type, out of range, or contradicts another.
    """
    text, doubts = settled(_language_model(fields), _levels(fields))
    model = _decoder(text, architecture, stored, doubts)
    model = replace(model, tower=tower or _tower(fields, stored, model.dtype_bytes))
    count = number(text, _PREDICTS, 0)
    if count and model.layers:
        block = model.layers[-1] if model.checkpoint is None else in_16_bits_for_prediction(model.layers[-1], text)
        model = replace(model, mtp_layers=count, mtp_block=(block,))
    return _estimated(model, because.field, stored)


def as_in_files(model: ModelGeometry, stored: StoredWeights) -> ModelGeometry:
    """Return a model of a known class, scaled to its files if these hold much more than its config.json describes.

    Then one of both is wrong, or the model has parts that sizing does not know.
    """
    quantized = model.checkpoint is not None
    loaded = stored.loaded_bytes(quantized=quantized) - stored.unused_bytes
    without_prediction, most = expected_file_bytes(model, output_head=stored.output_head)
    if stored.unused_bytes:
        most = without_prediction
    if loaded * 100 <= most * (100 + _MORE_IN_FILES_PERCENT):
        return model
    return _estimated(model, MORE_IN_FILES, stored)


def with_estimated_encoders(model: ModelGeometry, fields: Fields, stored: StoredWeights | None) -> ModelGeometry:
    """Return a model with the encoders of a class of which sizing implements the language model alone."""
    model = replace(model, tower=_tower(fields, stored, model.dtype_bytes))
    return _estimated(model, next((key for key, _ in _encoder_sections(fields)), "architectures"), stored)


def estimated_head(
    fields: Fields, architecture: str, method: str, because: UnmodelledError, stored: StoredWeights | None
) -> ModelGeometry:
    """Return the geometry of a draft head that sizing does not implement; parameters and errors as above."""
    text, doubts = settled(_language_model(fields), _levels(fields))
    model = _decoder(text, architecture, stored, doubts)
    model = replace(model, head=_head_parts(text, model, method, stored))
    if method == Method.EAGLE3 and model.layers:
        # Its first layer reads the token beside the hidden state (vLLM, llama_eagle3.py).
        model = replace(model, layers=(replace(model.layers[0], input_multiple=2), *model.layers[1:]))
    return _estimated(model, because.field, stored)


def _estimated(model: ModelGeometry, because: str, stored: StoredWeights | None) -> ModelGeometry:
    return _scaled(replace(model, knowledge=Knowledge.ESTIMATED, estimated_because=because), stored)


def _language_model(fields: Fields) -> Fields:
    """Return the fields with those of the innermost language model on top."""
    for key in _INNER:
        section = fields.section(key)
        if section is None:
            continue
        outer = {name: value for name, value in fields.values.items() if name not in (*_INNER, *_TOWER_SECTIONS)}
        # Sections of encoders stay: they tell nothing of the language model.
        inner = {name: value for name, value in section.values.items() if value is not None or name not in outer}
        names = {name: section.path(name) for name in inner}
        return _language_model(fields.having({**outer, **inner}, names))
    return fields


def _decoder(fields: Fields, architecture: str, stored: StoredWeights | None, doubts: tuple[str, ...]) -> ModelGeometry:
    of_layers = kinds(fields)
    hidden = required(fields, WIDTH)
    checkpoint, fields = _checkpoint(fields)
    tied = fields.flag("tie_word_embeddings") or (stored is not None and not stored.output_head)
    found = {
        "hidden_size": hidden,
        "num_hidden_layers": len(of_layers),
        "vocab_size": required(fields, VOCABULARY),
        "max_position_embeddings": number(fields, LENGTH, MAX_TOKENS),
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
    }
    fields = fields.having({**fields.values, **found})
    mixer, rope_dim = mixers(fields, of_layers, architecture)
    feed_forward = feed_forwards(fields, of_layers)
    decoder = Decoder(
        mixer,
        feed_forward,
        _ropes(fields, rope_dim),
        norms=_NORMS,
        tables_on_every_stage=True,
        norm_on_every_stage=True,
    )
    model = assemble(fields, architecture, decoder)
    doubts = (*doubts, *attention_doubts(fields, of_layers, architecture), *expert_doubts(fields, of_layers))
    stored_as = _with_experts(model.checkpoint if checkpoint is None else checkpoint, fields, architecture)
    return replace(model, checkpoint=stored_as, doubts=doubts)


def _with_experts(checkpoint: WeightFormat | None, fields: Fields, architecture: str) -> WeightFormat | None:
    """Return the format of a checkpoint with that of its experts, if they are in 4 bits beside layers in FP8.

    vLLM, models/deepseek_v41/quant_config.py, DeepseekV4FP8Config: files of DeepSeek V4 that do not say are so.
    """
    if checkpoint is None or checkpoint.precision is not Precision.FP8:
        return checkpoint
    default = "fp4" if architecture.startswith("DeepseekV4") else ""
    if fields.text("expert_dtype", default=default) != "fp4":
        return checkpoint
    return replace(checkpoint, expert_format=DEFAULT_FORMATS[Precision.MXFP4])


def _checkpoint(fields: Fields) -> tuple[WeightFormat | None, Fields]:
    """Return the format of a checkpoint that sizing does not implement, and the fields without it."""
    try:
        read_checkpoint(fields.having({"num_hidden_layers": 1, **fields.values}))
    except UnmodelledError:
        section = fields.values.get("quantization_config") or fields.values.get("compression_config")
        rest = {
            key: value
            for key, value in fields.values.items()
            if key not in ("quantization_config", "compression_config")
        }
        return _guessed_format(section), fields.having(rest)
    return None, fields


def _guessed_format(section: object) -> WeightFormat:
    """Return the format of most weights by the words and bits that a quantization_config names."""
    words = str(section).lower()
    bits = [str(value) for key, value in _leaves(section) if key in ("bits", "num_bits", "w_bit", "weight_bits")]
    by_word = {"nvfp4": Precision.NVFP4, "mxfp4": Precision.MXFP4, "fp8": Precision.FP8, "nf4": Precision.INT4}
    precision = next((each for word, each in by_word.items() if word in words), None)
    if precision is None:
        precision = Precision.INT4 if "4" in bits or "load_in_4bit': true" in words else Precision.FP8
    return DEFAULT_FORMATS[precision]


def _leaves(value: object, key: str = "") -> Iterable[tuple[str, object]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, str(name))
    else:
        yield key, value


def _ropes(fields: Fields, head_dim: int) -> tuple[RopeTable, ...]:
    if not head_dim or fields.size("max_position_embeddings") == MAX_TOKENS:
        return ()
    try:
        return (model_rope(fields, head_dim),)
    except GeometryError:
        # Its table is small, and covered by the margin.
        return ()


def _tower(fields: Fields, stored: StoredWeights | None, dtype_bytes: int) -> Tower:
    """Return the encoders: their bytes in the files, or else by the sizes of their sections.

    They are divided over the ranks, as most classes of vLLM do; the margin holds them whole.
    """
    elements = 0
    sections = list(_encoder_sections(fields))
    for _, section in sections:
        width = number(section, _TOWER_WIDTH, 0)
        inner = number(section, _TOWER_INNER, _TOWER_WIDENS * width)
        elements += number(section, _TOWER_LAYERS, 0) * width * (_TOWER_WIDENS * width + _TOWER_PROJECTIONS * inner)
    if stored is not None and stored.bytes_by_part:
        elements = stored.encoder_bytes // dtype_bytes
    return Tower(split_elements=elements, unknown_items=True) if elements or sections else Tower()


def _encoder_sections(fields: Fields) -> Iterable[tuple[str, Fields]]:
    for level in _levels(fields):
        for key in _TOWER_SECTIONS:
            if section := _object(level, key):
                yield key, section


def _levels(fields: Fields) -> Iterable[Fields]:
    yield fields
    for key in _INNER:
        section = fields.section(key)
        if section is not None:
            yield from _levels(section)


def _object(fields: Fields, key: str) -> Fields | None:
    return fields.section(key) if isinstance(fields.values.get(key), Mapping) else None


def _head_parts(fields: Fields, model: ModelGeometry, method: str, stored: StoredWeights | None) -> HeadParts:
    """Return what a head of a method holds beside its layers; an output head that its files lack is the target's."""
    size = model.hidden_size
    width = number(fields, ("target_hidden_size",), size)
    rows = number(fields, ("draft_vocab_size",), model.vocab_size)
    no_output = stored is not None and not stored.output_head
    joins = method in (Method.EAGLE3, Method.DFLASH, Method.DSPARK)
    states = _joined(fields, method) if joins else 0
    blocks = method in (Method.DFLASH, Method.DSPARK)
    mapped = rows * TOKEN_ID_BYTES if rows != model.vocab_size else 0
    shares_output = method in (Method.EAGLE, Method.MTP) or blocks or no_output
    return HeadParts(
        output_rows=rows,
        shares_embedding=width == size,
        shares_output=shares_output,
        whole_elements=(states * width if joins else 2 * size) * size + _NORMS * size,
        whole_bytes=mapped,
        token_map_bytes=mapped,
        auxiliary_states=states,
        copies_keys_and_values=blocks,
        reads_width=width,
    )


def _joined(fields: Fields, method: str) -> int:
    for section in (fields, *(found for key in ("eagle_config", "dflash_config") if (found := _object(fields, key)))):
        for key in ("eagle_aux_hidden_state_layer_ids", "target_layer_ids"):
            ids = section.values.get(key)
            if isinstance(ids, list) and ids:
                return len(ids)
    return _AUXILIARY_STATES if method == Method.EAGLE3 else fields.size("num_hidden_layers", default=_AUXILIARY_STATES)


def _scaled(model: ModelGeometry, stored: StoredWeights | None) -> ModelGeometry:
    """Return the model with its layers scaled to the bytes that the files hold for them."""
    if stored is None or not stored.total_bytes:
        return replace(model, stored=stored)
    precision, one = model.checkpoint_precision or Precision.BF16, Split(1)
    parts = weight_parts(model, precision, one, whole_model(model))
    by_shape = parts["layers"]
    loaded = stored.loaded_bytes(quantized=model.checkpoint is not None)
    tables = stored.table_bytes
    if tables is not None:
        # Further tables, such as those of n-grams, count with the layers.
        by_vocabulary = next((int(size) for part, size in parts.items() if part.startswith("embedding")), 0)
        tables = min(tables * loaded // stored.total_bytes, by_vocabulary)
    else:
        count = (
            1 if model.head is None else int(model.head.embeds and not model.head.shares_embedding)
        ) + stored.output_head
        tables = count * model.vocab_size * model.hidden_size * model.dtype_bytes
    beside = parts["encoder"] + parts.get("joining layers", 0)
    unused = stored.unused_bytes * loaded // stored.total_bytes
    in_files = loaded - tables - beside - unused
    model = replace(model, stored=stored, mtp_scale=_prediction_scale(model, stored))
    if by_shape <= 0 or in_files <= 0:
        return model
    return replace(model, layer_scale=(in_files, int(by_shape)))


def _prediction_scale(model: ModelGeometry, stored: StoredWeights) -> tuple[int, int]:
    """Return the bytes of layers for multi-token prediction in the files, and as their shapes give them.

    Files often hold them in 16 bits beside quantized layers, and their experts may have other sizes.
    """
    projections = model.mtp_layers * 2 * model.hidden_size**2 * model.dtype_bytes
    in_files = stored.prediction_bytes - projections
    if not model.mtp_block or in_files <= 0:
        return (1, 1)
    layers = replace(model, layers=model.mtp_block * model.mtp_layers, final_norms=0, layer_scale=(1, 1))
    precision = model.checkpoint_precision or Precision.BF16
    return in_files, int(weight_parts(layers, precision, Split(1), whole_model(layers))["layers"])
