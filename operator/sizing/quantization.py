"""Formats of stored weights, and how to read them from a config.json's quantization_config.

The module supports fp8, compressed-tensors, AWQ, GPTQ, MXFP4 and ModelOpt. In each format, embeddings, the output
head, norms and biases keep the model's 16-bit type.

Exclusion patterns are untrusted input. They are compiled by pydantic's Rust regex engine, which does not backtrack:
matching time is proportional to the length of the name times that of the patterns. Python's `re` could take
exponential time.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from pydantic_core import SchemaError, SchemaValidator, core_schema

from specdecode_operator.enums import FP8_ELEMENT_BYTES, Precision
from specdecode_operator.problems import shown
from specdecode_operator.sizing.config_fields import Fields
from specdecode_operator.sizing.data_files import read_data
from specdecode_operator.sizing.geometry import DEFAULT_FORMATS, Layer, QuantizationMethod, Scales, WeightFormat

_EXPRESSION: Final = "re:"
_MOST_EXPRESSIONS: Final = 32
_LONGEST: Final = 128
"""Characters of one pattern, each of which costs time to compile: those of the catalogue have 50 at most."""

_MOST_COMPARED: Final = 131_072
"""Characters of patterns times the layers they are compared with: those of the catalogue come to 9,000 at most."""

_MOST_KEYS: Final = 4
"""Of one file, which is read for the model and once more for its layers for multi-token prediction."""

_DIGITS_COUNTED: Final = re.compile(r"(?:\\d|\[0-9\])\{\d(?:,\d?)?\}")
"""The only counts that may be repeated by number: each other one can make an automaton of any size of a few letters."""

_NEGATED: Final = re.compile(r"\^?\(\?!")
"""How some checkpoints say what they do quantize: ``re:^(?!.*experts).*`` excludes all else."""

_TOKENS: Final = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()|]")
_LAYER_NUMBER: Final = re.compile(r"layers\.(\d+)(?=\.|$)")


@dataclass(frozen=True)
class Exclusions:
    """What stays in 16 bits, sorted so that thousands of entries can be asked: parts of names, and patterns.

    ``automata`` has one for the patterns that name a layer, by its number, and without a number one for the others.
    """

    parts: frozenset[str]
    lengths: Mapping[str, tuple[int, ...]]  # in words, of the parts by their first word, from the shortest
    automata: Mapping[str, SchemaValidator]
    negated: tuple[tuple[SchemaValidator, SchemaValidator], ...]  # What may not hold for a name, and what must

    @classmethod
    def of(cls, texts: Iterable[str]) -> "Exclusions":
        """Return the exclusions of texts as files write them."""
        parts, patterns, negated = set(), defaultdict(list), []
        for text in texts:
            if not _is_pattern(text):
                parts.add(text)
                continue
            unwanted, wanted = _split(_written_for_rust(text))
            if unwanted is None:
                patterns[_number_in(text)].append(wanted)
            else:
                negated.append((_automaton([unwanted]), _automaton([wanted])))
        automata = {number: _automaton(found) for number, found in patterns.items()}
        return cls(frozenset(parts), _lengths(parts), automata, tuple(negated))

    def hold(self, name: str) -> bool:
        """Whether a module with this name stays in 16 bits."""
        # Of a checkpoint with many layers ten thousand names are asked: most have nothing of either.
        if self._holds_a_part(name):
            return True
        return bool(self.automata or self.negated) and self._holds_a_pattern(name)

    def _holds_a_part(self, name: str) -> bool:
        words = name.split(".")
        for start, word in enumerate(words):
            for length in self.lengths.get(word, ()):
                if start + length > len(words):
                    break
                if ".".join(words[start : start + length]) in self.parts:
                    return True
        return False

    def _holds_a_pattern(self, name: str) -> bool:
        for number in ("", _layer_number(name)):
            automaton = self.automata.get(number)
            if automaton is not None and automaton.isinstance_python(name):
                return True
        return any(
            wanted.isinstance_python(name) and not unwanted.isinstance_python(name) for unwanted, wanted in self.negated
        )


def _lengths(parts: Iterable[str]) -> dict[str, tuple[int, ...]]:
    found: defaultdict[str, set[int]] = defaultdict(set)
    for part in parts:
        first, *more = part.split(".")
        found[first].add(1 + len(more))
    return {first: tuple(sorted(lengths)) for first, lengths in found.items()}


def read_exclusions(section: Fields, key: str, num_layers: int) -> Exclusions:
    """Return what a key of quantization_config excludes; patterns that cost more than any checkpoint's are refused."""
    texts = section.strings(key)
    patterns = [text for text in texts if _is_pattern(text)]
    expressions = [text.removeprefix(_EXPRESSION) for text in patterns if text.startswith(_EXPRESSION)]
    if len(expressions) > _MOST_EXPRESSIONS:
        raise section.error(key, f"has more than {_MOST_EXPRESSIONS} regular expressions: name the modules")
    for long in (pattern for pattern in patterns if len(pattern) > _LONGEST):
        raise section.error(key, f"{shown(long)} is a pattern of more than {_LONGEST} characters: name the modules")
    compared = sum(len(pattern) * (1 if _number_in(pattern) else num_layers) for pattern in patterns)
    if compared > _MOST_COMPARED:
        message = (
            f"{len(patterns):,} patterns, over {num_layers:,} layers, come to {compared:,} characters to compare names"
            f" with, {_MOST_COMPARED:,} at most: name the modules"
        )
        raise section.error(key, message)
    for expression in expressions:
        if problem := _problem(expression):
            raise section.error(key, f"{shown(expression)} {problem}: name the modules")
    try:
        return _exclusions(texts)
    except SchemaError as error:
        raise section.error(key, f"its {len(patterns):,} patterns are too many: name the modules") from error


@lru_cache(maxsize=_MOST_KEYS)
def _exclusions(texts: tuple[str, ...]) -> Exclusions:
    return Exclusions.of(texts)


def _problem(expression: str) -> str | None:
    if "{" in _DIGITS_COUNTED.sub("", expression):
        return r"counts by { and }, which only \d and [0-9] may, up to 9"
    try:
        for part in _split(expression):
            if part is not None:
                _compiled(part)
                _automaton([part])
    except SchemaError:
        return "is no regular expression, or looks back or around, which only one (?! ) at its beginning may"
    return None


def _is_pattern(text: str) -> bool:
    return text.startswith(_EXPRESSION) or "*" in text


def _written_for_rust(pattern: str) -> str:
    """Return the expression for a pattern: of a glob, that of part of a name."""
    if pattern.startswith(_EXPRESSION):
        return pattern.removeprefix(_EXPRESSION)
    glob = re.escape(pattern).replace(r"\*", ".*")
    return rf"(?:.*\.)?{glob}(?:\.|$)"


def _split(expression: str) -> tuple[str | None, str]:
    """Return what a negative look-ahead at the beginning of all does not want, and the rest: the engine has none."""
    start, end, depth = _NEGATED.match(expression), None, 1
    for token in _TOKENS.finditer(expression, start.end()) if start else ():
        if token[0] == "|" and depth == 0:
            return None, expression
        depth += (token[0] == "(") - (token[0] == ")")
        if depth == 0 and end is None:
            end = token
    if start is None or end is None:
        return None, expression
    return expression[start.end() : end.start()], expression[end.end() :]


def _automaton(expressions: Iterable[str]) -> SchemaValidator:
    """Return what tells whether a name begins with one of these."""
    return _compiled(rf"\A(?:{'|'.join(f'(?:{expression})' for expression in expressions)})")


def _compiled(expression: str) -> SchemaValidator:
    return SchemaValidator(core_schema.str_schema(pattern=expression))


def _number_in(pattern: str) -> str:
    """Return the number of the only layer that a glob can hold for; nothing where it may hold for any."""
    return "" if pattern.startswith(_EXPRESSION) else _layer_number(pattern)


def _layer_number(name: str) -> str:
    found = _LAYER_NUMBER.search(name)
    return found[1] if found else ""


_BLOCK_EDGE = 128
"""Edge of the blocks that the FP8 kernels of vLLM on Hopper (CUTLASS, DeepGEMM) take."""

_PACKED_PRECISIONS = {4: Precision.INT4, 8: Precision.INT8}
"""Precision of packed integers by their bits."""

_WHOLE_CHANNEL = -1
"""What files write as the group size where a group is a whole channel."""


def read_format(section: Fields) -> WeightFormat:
    """Return the format that a quantization_config describes; refuse by name what sizing does not know."""
    if not section.is_set("quant_method"):
        raise section.error(
            "quant_method", "is missing; without it vLLM takes the weights for 16 bits and cannot load them"
        )
    match section.text("quant_method", default=""):
        case "fp8":
            return _fp8(section)
        case "compressed-tensors":
            return _compressed_tensors(section)
        case "awq":
            return _awq(section)
        case "gptq":
            return _gptq(section)
        case "mxfp4":
            return DEFAULT_FORMATS[Precision.MXFP4]
        case "modelopt" | "modelopt_fp4":
            return _modelopt(section)
        case method if method in read_data("registry.json")["quantization"]:
            raise section.unmodelled("quant_method", "sizing does not implement this method")
        case _:
            known = "fp8, compressed-tensors, awq, gptq, mxfp4 or modelopt"
            raise section.error("quant_method", f"vLLM does not know this method; use {known}")


def _fp8(section: Fields) -> WeightFormat:
    edges = section.values.get("weight_block_size")
    if edges is None:
        static = section.text("activation_scheme", default="dynamic") == "static"
        return WeightFormat(Precision.FP8, Scales.TENSOR, method=QuantizationMethod.FP8, static_inputs=static)
    return WeightFormat(
        Precision.FP8, Scales.BLOCK, group_size=_block_edge(section, "weight_block_size"), method=QuantizationMethod.FP8
    )


def _block_edge(section: Fields, key: str) -> int:
    if section.values.get(key) not in ([_BLOCK_EDGE] * 2, (_BLOCK_EDGE,) * 2):
        raise section.unmodelled(key, f"must be [{_BLOCK_EDGE}, {_BLOCK_EDGE}]")
    return _BLOCK_EDGE


def _compressed_tensors(section: Fields) -> WeightFormat:
    groups = section.section("config_groups")
    schemes = [] if groups is None else [groups.section(name) for name in groups.values]
    if groups is None or len(schemes) != 1 or schemes[0] is None:
        raise section.unmodelled("config_groups", "must hold exactly one scheme for all linear layers")
    weights = schemes[0].section("weights")
    if weights is None:
        raise schemes[0].error("weights", "is missing; copy it from the model's config.json")
    return replace(
        _compressed_weights(weights, schemes[0].section("input_activations")),
        method=QuantizationMethod.COMPRESSED_TENSORS,
    )


def _compressed_weights(weights: Fields, inputs: Fields | None) -> WeightFormat:
    kind = weights.text("type", default="int")
    strategy = weights.text("strategy", default="channel")
    match weights.size("num_bits"), kind, strategy:
        case 8, "float" | "int", "channel" if kind == "float" or inputs is not None:
            return WeightFormat(Precision.FP8 if kind == "float" else Precision.INT8, Scales.CHANNEL)
        case 8, "float", "tensor":
            # Scales of activations that are found while running are not stored.
            static = inputs is not None and not inputs.values.get("dynamic")
            return WeightFormat(Precision.FP8, Scales.TENSOR, static_inputs=static)
        case 8, "float", "block":
            return WeightFormat(Precision.FP8, Scales.BLOCK, group_size=_block_edge(weights, "block_structure"))
        case 8, "int", "tensor" if inputs is not None:
            return WeightFormat(Precision.INT8, Scales.TENSOR)
        case 4, "float", "tensor_group":
            return replace(DEFAULT_FORMATS[Precision.NVFP4], static_inputs=inputs is not None)
        case 4 | 8 as bits, "int", "group" | "channel":
            size = weights.size("group_size") if strategy == "group" else 0
            zero_points = not weights.flag("symmetric", default=True)
            return WeightFormat(_PACKED_PRECISIONS[bits], Scales.GROUP, size, zero_points=zero_points)
        case bits, _, _:
            raise weights.unmodelled(
                "num_bits",
                f"{bits}-bit {shown(kind)} weights with strategy {shown(strategy)} cannot be sized; "
                "known are 8-bit float by tensor, channel or block, 8-bit int by tensor, channel or group, "
                "4-bit int by channel or group, and NVFP4",
            )


def _awq(section: Fields) -> WeightFormat:
    bits_key = "w_bit" if section.is_set("w_bit") else "bits"
    precision = _packed_precision(section, bits_key)
    if precision is not Precision.INT4:
        raise section.unmodelled(bits_key, "only 4-bit AWQ checkpoints can be sized")
    key = "q_group_size" if section.is_set("q_group_size") else "group_size"
    return WeightFormat(
        precision, Scales.GROUP, _group_size(section, key), zero_points=True, method=QuantizationMethod.AWQ
    )


def _gptq(section: Fields) -> WeightFormat:
    precision = _packed_precision(section, "bits")
    if not section.flag("sym", default=True):
        raise section.error("sym", "vLLM's kernels take symmetric GPTQ only; use a checkpoint with sym true")
    group_size = _group_size(section, "group_size")
    return WeightFormat(
        precision,
        Scales.GROUP,
        group_size,
        zero_points=True,
        method=QuantizationMethod.GPTQ,
        ordered_by_activation=section.flag("desc_act") and group_size > 0,
    )


def _packed_precision(section: Fields, key: str) -> Precision:
    precision = _PACKED_PRECISIONS.get(section.size(key))
    if precision is None:
        raise section.unmodelled(key, "only 4 and 8 bits can be sized")
    return precision


def _group_size(section: Fields, key: str) -> int:
    return 0 if section.values.get(key) == _WHOLE_CHANNEL else section.size(key)


def _modelopt(section: Fields) -> WeightFormat:
    algorithm = section.text("quant_algo", default="FP8").upper()
    if algorithm == "NVFP4":
        groups = section.section("config_groups")
        schemes = [] if groups is None else list(groups.values.values())
        # Without a scheme for activations in any group, weights alone are (vLLM, modelopt.py, ModelOptNvFp4Config).
        weight_only = bool(schemes) and not any(_quantizes_inputs(scheme) for scheme in schemes)
        return replace(DEFAULT_FORMATS[Precision.NVFP4], static_inputs=not weight_only)
    if algorithm == "FP8":
        return WeightFormat(Precision.FP8, Scales.TENSOR, method=QuantizationMethod.MODELOPT, static_inputs=True)
    raise section.unmodelled("quant_algo", "is not supported; use FP8 or NVFP4")


def _quantizes_inputs(scheme: object) -> bool:
    return isinstance(scheme, Mapping) and scheme.get("input_activations") is not None


_HEAD = "lm_head"


_EXCLUSION_KEYS = ("ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules")

_DYNAMIC = "dynamic"
_SKIPPED = "-:"
"""GPTQModel's settings by module, and what its patterns of modules in 16 bits begin with (vLLM, gptq_utils.py,
get_dynamic_override).
"""

_QUANTIZABLE = (
    "self_attn.q_proj",
    "self_attn.o_proj",
    "self_attn.indexer.wq_b",
    "linear_attn.in_proj_qkvz",
    "linear_attn.out_proj",
    "mamba.in_proj",
    "mamba.out_proj",
    "mlp.gate_proj",
    "mlp.down_proj",
    "mlp.gate",
    "mlp.experts.0.gate_proj",
    "experts.0.gate_proj",
    "mlp.shared_experts.gate_proj",
    "mlp.shared_experts.down_proj",
    "mlp.fc1_latent_proj",
    "mlp.fc2_latent_proj",
    "per_layer_input_gate",
    "per_layer_projection",
)
"""Modules of a layer that a checkpoint may hold quantized, one for all that the engine merges with it."""

_ALIASES = {
    "mlp.fc2_latent_proj": ("mixer.fc2_latent_proj",),
    "mlp.fc1_latent_proj": ("mixer.fc1_latent_proj",),
    "mamba.out_proj": ("mixer.out_proj",),
    "linear_attn.in_proj_qkvz": ("linear_attn.in_proj_qkv",),
    "mamba.in_proj": ("mixer.in_proj",),
    "self_attn.o_proj": ("mixer.o_proj",),
    "self_attn.q_proj": ("self_attn.qkv_proj", "self_attn.q_b_proj", "self_attn", "mixer.q_proj"),
    "mlp.gate_proj": ("mlp.gate_up_proj", "feed_forward.gate_proj", "shared_mlp.input_linear", "mixer.up_proj"),
    "mlp.down_proj": ("feed_forward.down_proj", "shared_mlp.output_linear", "mixer.down_proj"),
    "mlp.experts.0.gate_proj": (
        "block_sparse_moe.experts.0.w1",
        "feed_forward.experts",
        "block_sparse_moe.input_linear",
        "mixer.experts.0.up_proj",
    ),
    "mlp.shared_experts.gate_proj": (
        "mlp.shared_expert.gate_proj",
        "feed_forward.shared_expert.gate_proj",
        "shared_mlp.input_linear",
        "mixer.shared_experts.up_proj",
    ),
    "mlp.shared_experts.down_proj": (
        "mlp.shared_expert.down_proj",
        "feed_forward.shared_expert.down_proj",
        "shared_mlp.output_linear",
        "mixer.shared_experts.down_proj",
    ),
}
"""Other names that files use for the same modules."""

_PREFIXES = ("model.layers", "backbone.layers", "language_model.model.layers", "model.language_model.layers")

_PREDICTION_LAYERS = "mtp.layers"
"""What the files of Qwen3.5 and Nemotron 3 call their layers for multi-token prediction."""

_PREDICTION = re.compile(r"\bmtp(\b|_)")


@dataclass(frozen=True)
class Checkpoint:
    """How a checkpoint is stored."""

    format: WeightFormat | None  # Format of its quantized layers; None when nothing is quantized
    excluded: tuple[Exclusions, ...] = ()  # Modules that stay in 16 bits
    # Bytes of a number in the KV cache where the checkpoint asks for it; None where it does not
    cache_element_bytes: int | None = None

    def unquantized_modules(self, layer_index: int) -> frozenset[str]:
        """Return the modules of one layer that stay in 16 bits."""
        return self._unquantized([f"{prefix}.{layer_index}" for prefix in _PREFIXES]) if self.excluded else frozenset()

    def unquantized_prediction_modules(self, num_layers: int, index: int = 0) -> frozenset[str]:
        """Return the modules of a layer for multi-token prediction that stay in 16 bits.

        Files number it after the last layer, or apart (Qwen3.5, Nemotron 3).
        """
        after = (f"{prefix}.{num_layers + index}" for prefix in _PREFIXES)
        return self._unquantized([*after, f"{_PREDICTION_LAYERS}.{index}"]) if self.excluded else frozenset()

    def _unquantized(self, layers: Sequence[str]) -> frozenset[str]:
        return frozenset(
            module
            for module in _QUANTIZABLE
            if any(
                exclusions.hold(f"{layer}.{name}")
                for exclusions in self.excluded
                for layer in layers
                for name in _names(module)
            )
        )


def read_checkpoint(config: Fields) -> Checkpoint:
    """Return how the checkpoint stores its linear layers.

    Knows fp8, compressed-tensors, AWQ, GPTQ, MXFP4 and ModelOpt's FP8 and
    NVFP4, and refuses the rest by name.
    """
    section = config.section("quantization_config") or config.section("compression_config")
    if section is None:
        return Checkpoint(None)
    inner = section.section("quantization")
    if inner is not None:
        # The older file of ModelOpt, hf_quant_config.json, has its producer outside.
        section = inner.having({"quant_method": "modelopt", **inner.values})
    num_layers = config.size("num_hidden_layers", default=1)
    excluded = tuple(read_exclusions(section, key, num_layers) for key in _EXCLUSION_KEYS if section.is_set(key))
    if section.is_set(_DYNAMIC):
        excluded = (*excluded, read_exclusions(_skipped(section), _DYNAMIC, num_layers))
    _refuse_quantized_head(config, section)
    return Checkpoint(read_format(section), excluded, _cache_element_bytes(section))


def in_16_bits_for_prediction(layer: Layer, config: Fields) -> Layer:
    """Return a layer for multi-token prediction of a checkpoint in a format that sizing does not implement.

    It is in 16 bits if the file names such layers among what it does not quantize.
    """
    section = config.values.get("quantization_config")
    inner = section.get("quantization", section) if isinstance(section, Mapping) else {}
    named = [inner.get(key) for key in (*_EXCLUSION_KEYS, _DYNAMIC)] if isinstance(inner, Mapping) else []
    excluded = any(_PREDICTION.search(str(each)) for each in named if each)
    return replace(layer, unquantized=frozenset(_QUANTIZABLE)) if excluded else layer


def _skipped(section: Fields) -> Fields:
    """Return the section with patterns of the modules that GPTQModel left in 16 bits under its key."""
    rules = section.section(_DYNAMIC) or section.having({})
    if any(value for key, value in rules.values.items() if not key.startswith(_SKIPPED)):
        raise section.unmodelled(_DYNAMIC, "modules with settings of their own cannot be sized yet")
    patterns = [f"re:{key.removeprefix(_SKIPPED)}" for key in rules.values if key.startswith(_SKIPPED)]
    return section.having({_DYNAMIC: patterns})


def _refuse_quantized_head(config: Fields, section: Fields) -> None:
    """Refuse a quantized output head: ModelOpt's is, unless it is left out (vLLM, modelopt.py, get_quant_method)."""
    if section.flag("lm_head"):
        raise section.unmodelled("lm_head", "a quantized output head cannot be sized yet")
    excluded = [name for key in _EXCLUSION_KEYS for name in section.strings(key)]
    by_modelopt = section.text("quant_method", default="").startswith(QuantizationMethod.MODELOPT)
    # A file that leaves nothing out is taken to be cut short: ModelOpt itself always leaves the head out.
    if (
        by_modelopt
        and excluded
        and not config.flag("tie_word_embeddings")
        and not any(_HEAD in name for name in excluded)
    ):
        key = "ignore" if section.is_set("ignore") else "exclude_modules"
        raise section.unmodelled(key, f"lacks {_HEAD}: a quantized output head cannot be sized yet")


def _cache_element_bytes(section: Fields) -> int | None:
    """Return what the engine makes of `--kv-cache-dtype auto`; None for the model's own type.

    vLLM, torch_utils.py, get_kv_cache_quant_algo_string, and attention.py for compressed-tensors.
    """
    method = section.text("quant_method", default="")
    asked = section.values.get("kv_cache_scheme") or section.values.get("kv_cache_quant_algo")
    if asked is None:
        return None
    if method == QuantizationMethod.COMPRESSED_TENSORS:
        return FP8_ELEMENT_BYTES
    if not method.startswith(QuantizationMethod.MODELOPT):
        return None
    match asked:
        case {"dynamic": False, "num_bits": 8, "type": "float"}:
            return FP8_ELEMENT_BYTES
        case str() if asked.lower() == "fp8":
            return FP8_ELEMENT_BYTES
        case {"num_bits": 4, "type": "float"}:
            raise section.unmodelled("kv_cache_scheme", "a KV cache in 4 bits cannot be sized")
        case str() if asked.lower() == "nvfp4":
            raise section.unmodelled("kv_cache_quant_algo", "a KV cache in 4 bits cannot be sized")
        case _:
            return None


def _names(module: str) -> tuple[str, ...]:
    return (module, *_ALIASES.get(module, ()))
