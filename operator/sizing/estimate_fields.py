"""Fields of one JSON case of `specdecode plan --batch`: typed access, accepted key spellings, GPU names."""

import difflib
import math
import re
from collections.abc import Container, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from specdecode_operator.problems import printable, sentence, shown_or_missing
from specdecode_operator.sizing.arithmetic import GIB
from specdecode_operator.sizing.config_fields import typed
from specdecode_operator.sizing.devices import KNOWN_GPUS, Device, family_of, find_device, known_products, similar_name
from specdecode_operator.untrusted import UnreadableTextError, parse_json

_CLOSE: Final = 0.6
"""Minimum similarity of a misspelt key (1 is equal)."""

_SHOWN_CHARACTERS: Final = 80


class CaseError(ValueError):
    """A case that cannot be sized; the text names the key, the value and the fix."""

    def __init__(self, key: str, value: object, message: str) -> None:
        super().__init__(sentence(printable(key), shown_or_missing(value, _SHOWN_CHARACTERS), message))


class CaseFields(NamedTuple):
    """The values of a case, or of an object in it.

    The accessors return None if the key is absent or null.
    """

    values: Mapping[str, Any]
    prefix: str = ""  # Prepended to a key in messages, such as ``speculative.``
    spelled: Mapping[str, str] = MappingProxyType({})  # The case's own spelling of a key

    def named(self, spellings: Mapping[str, str], remarks: Container[str] = ()) -> "CaseFields":
        """Return the values by our names, given all their spellings; remarks are omitted.

        Raise CaseError for an unknown key, and for two keys that contradict each other.
        """
        if all(spellings.get(key) == key for key in self.values):
            return self
        values: dict[str, Any] = {}
        spelled: dict[str, str] = {}
        for key, value in self.values.items():
            name, plain = our_name(key, spellings), _plain(key)
            if name is None:
                if plain not in remarks:
                    meant = difflib.get_close_matches(plain, spellings, n=1, cutoff=_CLOSE)
                    known = ", ".join(dict.fromkeys(spellings.values()))
                    fix = f"did you mean {meant[0]}?" if meant else f"remove it, or use one of {known}"
                    raise self.error(key, f"is not a key of a case: {fix}")
            elif values.get(name) is None:
                values[name], spelled[name] = value, key
            elif value is not None and (value != values[name] or _kind(value) is not _kind(values[name])):
                raise self.error(key, f"contradicts {spelled[name]}, {values[name]!r}: remove one of the two")
        return CaseFields(values, self.prefix, spelled)

    def whole(self, key: str, most: int) -> int | None:
        """Return a whole number from 1."""
        value: int | None = typed(self, key, int, "must be a whole number")
        if value is not None and not 1 <= value <= most:
            raise self.error(key, f"must lie between 1 and {most:,}")
        return value

    def number(self, key: str, most: float) -> float | None:
        """Return a number above 0."""
        value: float | None = typed(self, key, (int, float), "must be a number")
        if value is None:
            return None
        if not math.isfinite(value):
            raise self.error(key, "must be a number")
        if not 0 < value <= most:
            raise self.error(key, f"must be above 0 and at most {most:g}")
        return float(value)

    def text(self, key: str) -> str | None:
        """Return a string that is not empty."""
        value: str | None = typed(self, key, str, "must be a string")
        if value == "":
            raise self.error(key, "must be a string")
        return value

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Return a boolean, or the default if the key is absent or null."""
        value: bool | None = typed(self, key, bool, "must be true or false")
        return default if value is None else value

    def section(self, key: str) -> "CaseFields | None":
        """Return a nested object, which may be JSON in a string as on the command line."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, str) and value.lstrip().startswith("{"):
            try:
                value = parse_json(value)
            except UnreadableTextError as error:
                raise self.error(key, str(error)) from error
        if not isinstance(value, dict):
            raise self.error(key, "must be an object")
        return CaseFields(value, f"{self.prefix}{self.spelled.get(key, key)}.")

    def error(self, key: str, message: str) -> CaseError:
        """Return an error about a key."""
        return CaseError(f"{self.prefix}{self.spelled.get(key, key)}", self.values.get(key), message)


def our_name(key: str, spellings: Mapping[str, str]) -> str | None:
    """Return our name of a key that may be spelled as in Python, JSON or on the command line; None for other keys."""
    return spellings.get(key) or spellings.get(_plain(key))


def _plain(key: str) -> str:
    return key.removeprefix("--").replace("-", "_")


def _kind(value: object) -> type:
    # JsonLines shares equal objects as instances of a subclass of dict.
    return dict if isinstance(value, dict) else type(value)


_CASE_KEYS: Final = (
    *("id", "vllm_version", "gpu", "gpu_total_gib", "tp", "pp", "dp", "enable_expert_parallel"),
    *("gpu_memory_utilization", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "dtype", "kv_cache_dtype"),
    *("block_size", "enforce_eager", "warm_compile_cache", "language_model_only", "limit_mm_per_prompt"),
    *("max_cudagraph_capture_size", "compilation_config", "decode_context_parallel_size", "mamba_ssm_cache_dtype"),
    *("enable_prefix_caching", "quantization", "model", "revision", "model_config", "hf_overrides", "speculative"),
    *("min_concurrency", "available_kv_gib"),
)
CASE_SPELLINGS: Final[Mapping[str, str]] = {
    **dict(zip(_CASE_KEYS, _CASE_KEYS, strict=True)),
    "tensor_parallel_size": "tp",
    "pipeline_parallel_size": "pp",
    "data_parallel_size": "dp",
    "max_seq_len": "max_model_len",
    "model_tag": "model",
    "speculative_config": "speculative",
}
"""Our key of a case for each name that vLLM has for it in its arguments and its log."""

REMARKS: Final = ("notes", "comment", "source", "source_url", "observed", "confidence", "gpu_count")
"""Keys of collected logs that have no effect. `gpu_count` above 1 also needs tp, pp or dp."""

_SPECULATIVE_KEYS: Final = (
    *("method", "num_speculative_tokens", "num_speculative_tokens_per_batch_size", "model", "revision"),
    *("model_config", "quantization", "max_model_len", "draft_tensor_parallel_size", "draft_sample_method"),
    *("enable_adaptive_verification", "use_heterogeneous_vocab", "parallel_drafting", "draft_lm_head_quantization"),
    *("xpress_topc", "rejection_sample_method"),
)
SPECULATIVE_SPELLINGS: Final[Mapping[str, str]] = dict(zip(_SPECULATIVE_KEYS, _SPECULATIVE_KEYS, strict=True))
"""Keys of a case's speculative section."""

SPECULATIVE_REMARKS: Final = (
    *("prompt_lookup_min", "prompt_lookup_max", "disable_padded_drafter_batch"),
    *("suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor"),
    *("suffix_decoding_min_token_prob", "draft_layers"),
    *("fly_window_size", "fly_entropy_threshold", "fly_entropy_top_k"),
)
"""Keys of vLLM's --speculative-config that change no memory, and one of collected logs."""


_OTHER_MEMORY: Final = ("MIG", "NVL")
"""Words that make another device of the same family."""

_SMALLEST_GIB: Final = 16
"""Smaller numbers in a name count GPUs."""

_ROUNDED_NAME: Final = 0.05
"""Maximum relative difference between the number in a name and the GiB that CUDA reports: 80 GB are 79.2, 96 GB 95."""

_SAME_TOTAL: Final = 0.02
"""Maximum relative difference between the totals of boards that count as one device."""


def full_product(name: str) -> str:
    """Return the product label of a short name; other names unchanged.

    A100 is not a short name, because there are also boards of 40 GB.
    """
    return find_named_gpu(name).product if name.upper() in ("H100", "H200", "H20") else name


def find_named_gpu(name: str) -> Device:
    """Return the device for a product label, ``H100``, or a name that holds one, such as ``H100 80GB``.

    Raise CaseError if no known device, or more than one, is meant.
    """
    exact = find_device(name)
    if exact is not None:
        return exact
    meant = [device for product in known_products() if (device := find_device(product)) and _is_meant(device, name)]
    if not meant:
        nearest = f"did you mean {similar}? For another GPU, " if (similar := similar_name(name)) else ""
        message = f"no memory figures are known for it: {nearest}give gpu_total_gib ({KNOWN_GPUS})"
        raise CaseError("gpu", name, message)
    largest = max(device.total_bytes for device in meant)
    if min(device.total_bytes for device in meant) < largest * (1 - _SAME_TOTAL):
        products = ", ".join(device.product for device in meant)
        raise CaseError("gpu", name, f"may be any of {products}: name one, or its memory, such as A100-80")

    def likeness(device: Device) -> tuple[int, bool]:
        shared = sum(detail in name.upper() for detail in device.product.upper().split("-"))
        # Among equals the board of most servers (SXM) wins.
        return shared, bool(re.search("SXM|HBM", device.product))

    return max(meant, key=likeness)


def _is_meant(device: Device, name: str) -> bool:
    """Return whether a name contains the device's family, and does not contradict its memory."""
    family = family_of(device.product).upper()
    details, wanted = device.product.upper().split("-"), name.upper()
    # GH200 is no H200, and H1000 would be no H100.
    if not re.search(rf"(?<![A-Z0-9]){family.replace('-', '[ -]?')}(?![0-9])", wanted):
        return False
    if any((word in details) is not bool(re.search(rf"\b{word}", wanted)) for word in _OTHER_MEMORY):
        return False
    numbers = re.findall(r"(?<![A-Z0-9.])(\d+)(?: ?GI?B)?(?![A-Z0-9.])", wanted)
    # 6000 of RTX PRO 6000 and 480GB of GH200 480GB are not the memory of the GPU.
    named = set(re.findall(r"\d+", device.product))
    asked = [int(number) for number in numbers if int(number) >= _SMALLEST_GIB and number not in named]
    return all(abs(device.total_bytes / GIB / number - 1) <= _ROUNDED_NAME for number in asked)
