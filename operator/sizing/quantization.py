"""Formats of stored weights, and how to read them from a config.json's quantization_config.

The module supports fp8, compressed-tensors, AWQ, GPTQ, MXFP4 and ModelOpt. In each format, embeddings, the output
head, norms and biases keep the model's 16-bit type.

Exclusion patterns are untrusted input. They are compiled by pydantic's Rust regex engine, which does not backtrack:
matching time is proportional to the length of the name times the length of the patterns. Python's `re` could take
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
"""Maximum characters of one pattern, because compiling takes time; the catalogue's have at most 50."""

_MOST_COMPARED: Final = 131_072
"""Maximum characters of a file's patterns times layers; the catalogue's have at most 9,000."""
_NEGATED_CHARACTERS: Final = 128
"""Minimum cost of a negated pattern. Negated patterns are not merged, and each is matched twice per name."""

_DIGITS_COUNTED: Final = re.compile(r"(?:\\d|\[0-9\])\{\d(?:,\d?)?\}")
"""The only parts that may have a count: any other can make an automaton of any size of a few letters."""

_NEGATED: Final = re.compile(r"\^?\(\?!")
"""Prefix of patterns that list the quantized modules: ``re:^(?!.*experts).*`` excludes all others."""

_TOKENS: Final = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()|]")
_LAYER_NUMBER: Final = re.compile(r"layers\.(\d+)(?=\.|$)")


@dataclass(frozen=True)
class Exclusions:
    """Modules that stay in 16 bits, as parts of names and as patterns, indexed for thousands of entries and names."""

    parts: frozenset[str]
    lengths: Mapping[str, tuple[int, ...]]  # Words of the parts by their first word, from the shortest
    automata: Mapping[str, SchemaValidator]  # Patterns that name one layer, by its number; the others under ""
    negated: tuple[tuple[SchemaValidator, SchemaValidator], ...]  # Pattern that must not match, and one that must

    @classmethod
    def of(cls, texts: Iterable[str]) -> "Exclusions":
        """Return the exclusions of texts as files write them."""
        parts, patterns, negated = set(), defaultdict(list), []
        for text in texts:
            if not _is_pattern(text):
                parts.add(text)
                continue
            if text.startswith(_EXPRESSION):
                expression = text.removeprefix(_EXPRESSION)
            else:
                # A glob may match part of a name.
                glob = re.escape(text).replace(r"\*", ".*")
                expression = rf"(?:.*\.)?{glob}(?:\.|$)"
            unwanted, wanted = _split(expression)
            if unwanted is None:
                patterns[_number_in(text)].append(wanted)
            else:
                negated.append((_automaton([unwanted]), _automaton([wanted])))
        lengths: defaultdict[str, set[int]] = defaultdict(set)
        for part in parts:
            lengths[part.partition(".")[0]].add(1 + part.count("."))
        return cls(
            frozenset(parts),
            {first: tuple(sorted(found)) for first, found in lengths.items()},
            {number: _automaton(found) for number, found in patterns.items()},
            tuple(negated),
        )

    def hold(self, name: str) -> bool:
        """Return whether a module with this name stays in 16 bits."""
        words = name.split(".")
        for start, word in enumerate(words):
            for length in self.lengths.get(word, ()):
                if start + length > len(words):
                    break  # The rest are longer; an untrusted file may have thousands.
                if ".".join(words[start : start + length]) in self.parts:
                    return True
        if not self.automata and not self.negated:
            return False
        found = (self.automata.get(number) for number in {"", _layer_number(name)})
        return any(automaton is not None and automaton.isinstance_python(name) for automaton in found) or any(
            wanted.isinstance_python(name) and not unwanted.isinstance_python(name) for unwanted, wanted in self.negated
        )


def _read_exclusions(section: Fields, keys: Sequence[str], num_layers: int) -> tuple[Exclusions, ...]:
    """Return the exclusions under keys of quantization_config; reject patterns costlier than any checkpoint's."""
    found, compared = [], 0
    for key in keys:
        # A list may repeat an entry any number of times.
        texts = tuple(dict.fromkeys(section.strings(key)))
        patterns = [text for text in texts if _is_pattern(text)]
        compared += sum(_characters(pattern, num_layers) for pattern in patterns)
        if compared > _MOST_COMPARED:
            message = (
                f"its patterns and those before come to {compared:,} characters over {num_layers:,} layers, above the"
                f" maximum of {_MOST_COMPARED:,}: name the modules"
            )
            raise section.error(key, message)
        found.append(_exclusions_under(section, key, texts, patterns))
    return tuple(found)


def _characters(pattern: str, num_layers: int) -> int:
    """Return the cost of matching a pattern with all layers, in characters."""
    is_negated = _split(pattern.removeprefix(_EXPRESSION))[0] is not None
    characters = max(len(pattern), _NEGATED_CHARACTERS) if is_negated else len(pattern)
    return characters * (1 if _number_in(pattern) else num_layers)


def _exclusions_under(section: Fields, key: str, texts: tuple[str, ...], patterns: Sequence[str]) -> Exclusions:
    expressions = [text.removeprefix(_EXPRESSION) for text in patterns if text.startswith(_EXPRESSION)]
    if len(expressions) > _MOST_EXPRESSIONS:
        raise section.error(key, f"has more than {_MOST_EXPRESSIONS} regular expressions: name the modules")
    for long in (pattern for pattern in patterns if len(pattern) > _LONGEST):
        raise section.error(key, f"{shown(long)} is a pattern of more than {_LONGEST} characters: name the modules")
    for expression in expressions:
        if "{" in _DIGITS_COUNTED.sub("", expression):
            problem = r"counts by { and }, which only \d and [0-9] may, up to 9"
            raise section.error(key, f"{shown(expression)} {problem}: name the modules")
        try:
            for part in filter(None, _split(expression)):
                _compiled(part)
                _automaton([part])
        except SchemaError:
            problem = "is not a regular expression, or looks back or around, which only one (?! ) at its beginning may"
            raise section.error(key, f"{shown(expression)} {problem}: name the modules") from None
    try:
        return _exclusions(texts)
    except SchemaError as error:
        raise section.error(key, f"its {len(patterns):,} patterns are too many: name the modules") from error


# A file has up to 4 keys, and is read for the model and once more for its layers for multi-token prediction.
@lru_cache(maxsize=4)
def _exclusions(texts: tuple[str, ...]) -> Exclusions:
    return Exclusions.of(texts)


def _is_pattern(text: str) -> bool:
    return text.startswith(_EXPRESSION) or "*" in text


def _split(expression: str) -> tuple[str | None, str]:
    """Return the content of a negative look-ahead at the beginning, which Rust's engine lacks, and the rest."""
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
    """Return a matcher of names that begin with one of these."""
    return _compiled(rf"\A(?:{'|'.join(f'(?:{expression})' for expression in expressions)})")


def _compiled(expression: str) -> SchemaValidator:
    return SchemaValidator(core_schema.str_schema(pattern=expression))


def _number_in(pattern: str) -> str:
    """Return the number of the only layer that a glob can match; empty if it may match any."""
    return "" if pattern.startswith(_EXPRESSION) else _layer_number(pattern)


def _layer_number(name: str) -> str:
    found = _LAYER_NUMBER.search(name)
    return found[1] if found else ""


_BLOCK_EDGE = 128
"""Edge of the blocks that the FP8 kernels of vLLM on Hopper (CUTLASS, DeepGEMM) take."""

_PACKED_PRECISIONS = {4: Precision.INT4, 8: Precision.INT8}


def _read_format(section: Fields) -> WeightFormat:
    """Return the format that a quantization_config describes; reject by name what sizing does not know."""
    if not section.is_set("quant_method"):
        raise section.error(
            "quant_method", "is missing; without it vLLM takes the weights for 16 bits and cannot load them"
        )
    match section.text("quant_method", default=""):
        case "fp8" if section.values.get("weight_block_size") is None:
            static = section.text("activation_scheme", default="dynamic") == "static"
            return WeightFormat(Precision.FP8, Scales.TENSOR, method=QuantizationMethod.FP8, static_inputs=static)
        case "fp8":
            edge = _block_edge(section, "weight_block_size")
            return WeightFormat(Precision.FP8, Scales.BLOCK, edge, method=QuantizationMethod.FP8)
        case "compressed-tensors":
            return _compressed_tensors(section)
        case "awq" | "gptq" as method:
            return _packed(section, QuantizationMethod(method))
        case "mxfp4":
            return DEFAULT_FORMATS[Precision.MXFP4]
        case "modelopt" | "modelopt_fp4":
            return _modelopt(section)
        case method if method in read_data("registry.json")["quantization"]:
            raise section.unmodelled("quant_method", "sizing does not implement this method")
        case _:
            known = "fp8, compressed-tensors, awq, gptq, mxfp4 or modelopt"
            raise section.error("quant_method", f"vLLM does not know this method; use {known}")


def _block_edge(section: Fields, key: str) -> int:
    if section.values.get(key) not in ([_BLOCK_EDGE] * 2, (_BLOCK_EDGE,) * 2):
        raise section.unmodelled(key, f"must be [{_BLOCK_EDGE}, {_BLOCK_EDGE}]")
    return _BLOCK_EDGE


def _compressed_tensors(section: Fields) -> WeightFormat:
    groups = section.section("config_groups")
    schemes = [] if groups is None else [groups.section(name) for name in groups.values]
    if len(schemes) != 1 or (scheme := schemes[0]) is None:
        raise section.unmodelled("config_groups", "must hold exactly one scheme for all linear layers")
    weights, inputs = scheme.section("weights"), scheme.section("input_activations")
    if weights is None:
        raise scheme.error("weights", "is missing; copy it from the model's config.json")
    kind = weights.text("type", default="int")
    strategy = weights.text("strategy", default="channel")
    match weights.size("num_bits"), kind, strategy:
        case 8, "float" | "int", "channel" if kind == "float" or inputs is not None:
            found = WeightFormat(Precision.FP8 if kind == "float" else Precision.INT8, Scales.CHANNEL)
        case 8, "float", "tensor":
            # Dynamic scales of activations are not stored.
            static = inputs is not None and not inputs.values.get("dynamic")
            found = WeightFormat(Precision.FP8, Scales.TENSOR, static_inputs=static)
        case 8, "float", "block":
            found = WeightFormat(Precision.FP8, Scales.BLOCK, group_size=_block_edge(weights, "block_structure"))
        case 8, "int", "tensor" if inputs is not None:
            found = WeightFormat(Precision.INT8, Scales.TENSOR)
        case 4, "float", "tensor_group":
            found = replace(DEFAULT_FORMATS[Precision.NVFP4], static_inputs=inputs is not None)
        case 4 | 8 as bits, "int", "group" | "channel":
            size = weights.size("group_size") if strategy == "group" else 0
            zero_points = not weights.flag("symmetric", default=True)
            found = WeightFormat(_PACKED_PRECISIONS[bits], Scales.GROUP, size, zero_points=zero_points)
        case bits, _, _:
            raise weights.unmodelled(
                "num_bits",
                f"{bits}-bit {shown(kind)} weights with strategy {shown(strategy)} cannot be sized; "
                "known are 8-bit float by tensor, channel or block, 8-bit int by tensor, channel or group, "
                "4-bit int by channel or group, and NVFP4",
            )
    return replace(found, method=QuantizationMethod.COMPRESSED_TENSORS)


def _packed(section: Fields, method: QuantizationMethod) -> WeightFormat:
    """Return the format of AWQ or GPTQ."""
    by_awq = method is QuantizationMethod.AWQ
    bits_key = "w_bit" if by_awq and section.is_set("w_bit") else "bits"
    precision = _PACKED_PRECISIONS.get(section.size(bits_key))
    if precision is None:
        raise section.unmodelled(bits_key, "only 4 and 8 bits can be sized")
    if by_awq and precision is not Precision.INT4:
        raise section.unmodelled(bits_key, "only 4-bit AWQ checkpoints can be sized")
    if not by_awq and not section.flag("sym", default=True):
        raise section.error("sym", "vLLM's kernels take symmetric GPTQ only; use a checkpoint with sym true")
    key = "q_group_size" if by_awq and section.is_set("q_group_size") else "group_size"
    # Files write -1 if a group is a whole channel.
    group_size = 0 if section.values.get(key) == -1 else section.size(key)
    ordered = not by_awq and section.flag("desc_act") and group_size > 0
    return WeightFormat(
        precision, Scales.GROUP, group_size, zero_points=True, method=method, ordered_by_activation=ordered
    )


def _modelopt(section: Fields) -> WeightFormat:
    algorithm = section.text("quant_algo", default="FP8").upper()
    if algorithm == "NVFP4":
        groups = section.section("config_groups")
        schemes = [] if groups is None else list(groups.values.values())
        # Without a scheme for activations in any group only weights are quantized (vLLM, modelopt.py,
        # ModelOptNvFp4Config).
        weight_only = bool(schemes) and not any(
            isinstance(scheme, Mapping) and scheme.get("input_activations") is not None for scheme in schemes
        )
        return replace(DEFAULT_FORMATS[Precision.NVFP4], static_inputs=not weight_only)
    if algorithm == "FP8":
        return WeightFormat(Precision.FP8, Scales.TENSOR, method=QuantizationMethod.MODELOPT, static_inputs=True)
    raise section.unmodelled("quant_algo", "is not supported; use FP8 or NVFP4")


_EXCLUSION_KEYS = ("ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules")

_DYNAMIC = "dynamic"
_SKIPPED = "-:"
"""GPTQModel's settings by module, and the prefix of its patterns of modules in 16 bits (vLLM, gptq_utils.py,
get_dynamic_override).
"""

_QUANTIZABLE: Mapping[str, tuple[str, ...]] = {
    "self_attn.q_proj": ("self_attn.qkv_proj", "self_attn.q_b_proj", "self_attn", "mixer.q_proj"),
    "self_attn.o_proj": ("mixer.o_proj",),
    "self_attn.indexer.wq_b": (),
    "linear_attn.in_proj_qkvz": ("linear_attn.in_proj_qkv",),
    "linear_attn.out_proj": (),
    "mamba.in_proj": ("mixer.in_proj",),
    "mamba.out_proj": ("mixer.out_proj",),
    "mlp.gate_proj": ("mlp.gate_up_proj", "feed_forward.gate_proj", "shared_mlp.input_linear", "mixer.up_proj"),
    "mlp.down_proj": ("feed_forward.down_proj", "shared_mlp.output_linear", "mixer.down_proj"),
    "mlp.gate": (),
    "mlp.experts.0.gate_proj": (
        *("block_sparse_moe.experts.0.w1", "feed_forward.experts"),
        *("block_sparse_moe.input_linear", "mixer.experts.0.up_proj"),
    ),
    "experts.0.gate_proj": (),
    "mlp.shared_experts.gate_proj": (
        *("mlp.shared_expert.gate_proj", "feed_forward.shared_expert.gate_proj"),
        *("shared_mlp.input_linear", "mixer.shared_experts.up_proj"),
    ),
    "mlp.shared_experts.down_proj": (
        *("mlp.shared_expert.down_proj", "feed_forward.shared_expert.down_proj"),
        *("shared_mlp.output_linear", "mixer.shared_experts.down_proj"),
    ),
    "mlp.fc1_latent_proj": ("mixer.fc1_latent_proj",),
    "mlp.fc2_latent_proj": ("mixer.fc2_latent_proj",),
    "per_layer_input_gate": (),
    "per_layer_projection": (),
}
"""Modules of a layer that a checkpoint may hold quantized, one for all that the engine merges with it, and other names
that files use for each."""

_PREFIXES = ("model.layers", "backbone.layers", "language_model.model.layers", "model.language_model.layers")

_PREDICTION = re.compile(r"\bmtp(\b|_)")


@dataclass(frozen=True)
class Checkpoint:
    """Storage of a checkpoint."""

    format: WeightFormat | None  # Format of its quantized layers; None if none is quantized
    excluded: tuple[Exclusions, ...] = ()  # Modules that stay in 16 bits
    cache_element_bytes: int | None = None  # Bytes of a number in the KV cache, if the checkpoint asks for it

    def unquantized_modules(self, layer_index: int) -> frozenset[str]:
        """Return the modules of one layer that stay in 16 bits."""
        return self._unquantized([f"{prefix}.{layer_index}" for prefix in _PREFIXES])

    def unquantized_prediction_modules(self, num_layers: int, index: int = 0) -> frozenset[str]:
        """Return the modules of a layer for multi-token prediction that stay in 16 bits.

        Files number it after the last layer, or apart (Qwen3.5, Nemotron 3).
        """
        return self._unquantized([*(f"{prefix}.{num_layers + index}" for prefix in _PREFIXES), f"mtp.layers.{index}"])

    def _unquantized(self, layers: Sequence[str]) -> frozenset[str]:
        return frozenset(
            module
            for module, aliases in (_QUANTIZABLE.items() if self.excluded else ())
            if any(
                exclusions.hold(f"{layer}.{name}")
                for exclusions in self.excluded
                for layer in layers
                for name in (module, *aliases)
            )
        )


def read_checkpoint(config: Fields) -> Checkpoint:
    """Return how the checkpoint stores its linear layers.

    Knows fp8, compressed-tensors, AWQ, GPTQ, MXFP4 and ModelOpt's FP8 and NVFP4, and rejects the rest by name.
    """
    section = config.section("quantization_config") or config.section("compression_config")
    if section is None:
        return Checkpoint(None)
    inner = section.section("quantization")
    if inner is not None:
        # The older file of ModelOpt, hf_quant_config.json, has its producer outside.
        section = inner.having({"quant_method": "modelopt", **inner.values})
    num_layers = config.size("num_hidden_layers", default=1)
    keys, listed = [key for key in _EXCLUSION_KEYS if section.is_set(key)], section
    if section.is_set(_DYNAMIC):
        rules = section.section(_DYNAMIC) or section.having({})
        if any(value for key, value in rules.values.items() if not key.startswith(_SKIPPED)):
            raise section.unmodelled(_DYNAMIC, "modules with separate settings cannot be sized yet")
        patterns = [f"re:{key.removeprefix(_SKIPPED)}" for key in rules.values if key.startswith(_SKIPPED)]
        keys, listed = [*keys, _DYNAMIC], section.having({**section.values, _DYNAMIC: patterns})
    excluded = _read_exclusions(listed, keys, num_layers)
    _reject_quantized_head(config, section)
    return Checkpoint(_read_format(section), excluded, _cache_element_bytes(section))


def in_16_bits_for_prediction(layer: Layer, config: Fields) -> Layer:
    """Return a layer for multi-token prediction of a checkpoint in a format that sizing does not implement.

    It is in 16 bits if the file names such layers among its exclusions.
    """
    section = config.values.get("quantization_config")
    inner = section.get("quantization", section) if isinstance(section, Mapping) else {}
    named = [inner.get(key) for key in (*_EXCLUSION_KEYS, _DYNAMIC)] if isinstance(inner, Mapping) else []
    excluded = any(_PREDICTION.search(str(each)) for each in named if each)
    return replace(layer, unquantized=frozenset(_QUANTIZABLE)) if excluded else layer


def _reject_quantized_head(config: Fields, section: Fields) -> None:
    """Reject a quantized output head: ModelOpt's is, unless it is excluded (vLLM, modelopt.py, get_quant_method)."""
    if section.flag("lm_head"):
        raise section.unmodelled("lm_head", "a quantized output head cannot be sized yet")
    excluded = [name for key in _EXCLUSION_KEYS for name in section.strings(key)]
    by_modelopt = section.text("quant_method", default="").startswith(QuantizationMethod.MODELOPT)
    # A file without exclusions is taken to be cut short: ModelOpt itself always excludes the head.
    if (
        by_modelopt
        and excluded
        and not config.flag("tie_word_embeddings")
        and not any("lm_head" in name for name in excluded)
    ):
        key = "ignore" if section.is_set("ignore") else "exclude_modules"
        raise section.unmodelled(key, "lacks lm_head: a quantized output head cannot be sized yet")


def _cache_element_bytes(section: Fields) -> int | None:
    """Return the element bytes of `--kv-cache-dtype auto`; None for the model's own type.

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
    match asked.lower() if isinstance(asked, str) else asked:
        case {"dynamic": False, "num_bits": 8, "type": "float"} | "fp8":
            return FP8_ELEMENT_BYTES
        case {"num_bits": 4, "type": "float"} | "nvfp4":
            key = "kv_cache_quant_algo" if isinstance(asked, str) else "kv_cache_scheme"
            raise section.unmodelled(key, "a KV cache in 4 bits cannot be sized")
        case _:
            return None
