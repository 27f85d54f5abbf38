"""Fields of one JSON case of `specdecode estimate`: typed access, accepted key spellings, GPU names."""

import difflib
import math
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from specdecode_operator.problems import printable, sentence, shown_or_missing
from specdecode_operator.sizing.arithmetic import GIB
from specdecode_operator.sizing.devices import Device, family_of, find_device, known_products
from specdecode_operator.untrusted import UnreadableTextError, parse_json

_CLOSE: Final = 0.6
"""How alike two keys are before one counts as a slip of the pen for the other (1 is equal)."""

_SHOWN_CHARACTERS: Final = 80


class CaseError(ValueError):
    """A case that cannot be sized; the text names the key, the value and the fix."""

    def __init__(self, key: str, value: object, message: str) -> None:
        super().__init__(sentence(printable(key), shown_or_missing(value, _SHOWN_CHARACTERS), message))


@dataclass(frozen=True)
class CaseFields:
    """The values of a case, or of an object in it."""

    values: Mapping[str, Any]  # The JSON object
    prefix: str = ""  # What stands before a key in messages, such as ``speculative.``

    # How the case itself calls a key, where that is another name
    spelled: Mapping[str, str] = field(default_factory=dict)

    def named(self, spellings: Mapping[str, str], remarks: Container[str] = ()) -> "CaseFields":
        """Return the values by our names, given all spellings of these; remarks are left out.

        Names are taken as Python, JSON and the command line write them: tensor_parallel_size, --tensor-parallel-size.

        Raises
        ------
        CaseError
            For a key that is none, and for two that contradict each other.
        """
        if all(spellings.get(key) == key for key in self.values):
            return self
        values: dict[str, Any] = {}
        spelled: dict[str, str] = {}
        for key, value in self.values.items():
            name = spellings.get(key) or spellings.get(_plain(key))
            if name is None:
                if (plain := _plain(key)) not in remarks:
                    raise self.error(key, _unknown(plain, spellings))
            elif values.get(name) is None:
                values[name], spelled[name] = value, key
            elif value is not None and (value != values[name] or _kind(value) is not _kind(values[name])):
                raise self.error(key, f"contradicts {spelled[name]}, {values[name]!r}: remove one of the two")
        return CaseFields(values, self.prefix, spelled)

    def whole(self, key: str, most: int, default: int | None = None) -> int | None:
        """Return a whole number from 1, or the default where the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            return default
        # JSON's true is an int to Python.
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, "must be a whole number")
        if not 1 <= value <= most:
            raise self.error(key, f"must lie between 1 and {most:,}")
        return value

    def number(self, key: str, most: float) -> float | None:
        """Return a number above 0, or None where the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(key, "must be a number")
        if not 0 < value <= most:
            raise self.error(key, f"must be above 0 and at most {most:g}")
        return float(value)

    def text(self, key: str) -> str | None:
        """Return a string that is not empty, or None where the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, str) or not value:
            raise self.error(key, "must be a string")
        return value

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Return a boolean, or the default where the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false")
        return value

    def section(self, key: str) -> "CaseFields | None":
        """Return a nested object, or None where the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, str) and value.lstrip().startswith("{"):
            # As it stands behind a flag of the command line.
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


def _kind(value: object) -> type:
    """Return what JSON tells apart: an object that lines share is an object."""
    return dict if isinstance(value, dict) else type(value)


def _plain(key: str) -> str:
    return key.removeprefix("--").replace("-", "_")


def _unknown(key: str, known: Mapping[str, str]) -> str:
    meant = difflib.get_close_matches(key, known, n=1, cutoff=_CLOSE)
    if meant:
        return f"is no key of a case: did you mean {meant[0]}?"
    return f"is no key of a case: remove it, or use one of {', '.join(dict.fromkeys(known.values()))}"


CASE_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "id": (),
    "vllm_version": (),
    "gpu": (),
    "gpu_total_gib": (),
    "tp": ("tensor_parallel_size",),
    "pp": ("pipeline_parallel_size",),
    "dp": ("data_parallel_size",),
    "enable_expert_parallel": (),
    "gpu_memory_utilization": (),
    "max_model_len": ("max_seq_len",),
    "max_num_seqs": (),
    "max_num_batched_tokens": (),
    "dtype": (),
    "kv_cache_dtype": (),
    "block_size": (),
    "enforce_eager": (),
    "warm_compile_cache": (),
    "language_model_only": (),
    "limit_mm_per_prompt": (),
    "max_cudagraph_capture_size": (),
    "compilation_config": (),
    "decode_context_parallel_size": (),
    "mamba_ssm_cache_dtype": (),
    "enable_prefix_caching": (),
    "quantization": (),
    "model": ("model_tag",),
    "revision": (),
    "model_config": (),
    "hf_overrides": (),
    "speculative": ("speculative_config",),
    "min_concurrency": (),
    "available_kv_gib": (),
}
"""Keys of a case, with other names that vLLM has for them in its arguments and its log."""

REMARKS: Final = ("notes", "comment", "source", "source_url", "observed", "confidence", "gpu_count")
"""Keys of collected logs that set nothing; of gpu_count more than one is asked what is spread over them."""

SPECULATIVE_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "method": (),
    "num_speculative_tokens": (),
    "num_speculative_tokens_per_batch_size": (),
    "model": (),
    "revision": (),
    "model_config": (),
    "quantization": (),
    "max_model_len": (),
    "draft_tensor_parallel_size": (),
    "draft_sample_method": (),
    "enable_adaptive_verification": (),
    "use_heterogeneous_vocab": (),
    "parallel_drafting": (),
    "draft_lm_head_quantization": (),
    "xpress_topc": (),
    "rejection_sample_method": (),
}
"""Keys of its speculative section that say something of memory, or what else is asked of a draft."""

SPECULATIVE_REMARKS: Final = (
    *("prompt_lookup_min", "prompt_lookup_max", "disable_padded_drafter_batch"),
    *("suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor"),
    *("suffix_decoding_min_token_prob", "draft_layers"),
    *("fly_window_size", "fly_entropy_threshold", "fly_entropy_top_k"),
)
"""Keys of vLLM's --speculative-config that change no memory, and one of collected logs."""


def _spellings(names: Mapping[str, Iterable[str]]) -> Mapping[str, str]:
    return {spelling: name for name, others in names.items() for spelling in (name, *others)}


CASE_SPELLINGS: Final = _spellings(CASE_NAMES)
SPECULATIVE_SPELLINGS: Final = _spellings(SPECULATIVE_NAMES)
"""Our key for each name that a key has."""


_OTHER_MEMORY: Final = ("MIG", "NVL")
"""Words that make another device of the same family."""

_SMALLEST_GIB: Final = 16
"""Smaller numbers in a name count GPUs."""

_ROUNDED_NAME: Final = 0.05
"""By how much the number in a name may differ from what CUDA reports in GiB: 80 GB are 79.2, 96 GB are 95."""

_SAME_TOTAL: Final = 0.02
"""By how much the totals of boards of one family may differ and still be the same device here."""


SHORT_NAMES: Final = ("H100", "H200", "H20")
"""Names that stand alone for the board of most servers, whose memory no other board of the name falls short of. A100 is
none: there are boards of 40 GB."""


def full_product(name: str) -> str:
    """Return the product label that a short name stands for; any other as it is."""
    return find_named_gpu(name).product if name.upper() in SHORT_NAMES else name


def find_named_gpu(name: str) -> Device:
    """Return the device for a product label, ``H100``, or a name that holds one, such as ``H100 80GB``.

    Raises
    ------
    CaseError
        When no known device, or more than one, is meant.
    """
    exact = find_device(name)
    if exact is not None:
        return exact
    known = ", ".join(known_products())
    meant = [device for product in known_products() if (device := find_device(product)) and _is_meant(device, name)]
    if not meant:
        message = f"no memory figures are known for it: use one of {known}, or give gpu_total_gib"
        raise CaseError("gpu", name, message)
    largest = max(device.total_bytes for device in meant)
    if min(device.total_bytes for device in meant) < largest * (1 - _SAME_TOTAL):
        products = ", ".join(device.product for device in meant)
        raise CaseError("gpu", name, f"may be any of {products}: name one, or its memory, such as A100-80")
    return max(meant, key=lambda device: _likeness(device.product, name))


def _likeness(product: str, name: str) -> tuple[int, bool]:
    """Details that product and name share; among equals the board of most servers (SXM) wins."""
    details = product.upper().split("-")
    return sum(detail in name.upper() for detail in details), bool(re.search("SXM|HBM", product))


def _is_meant(device: Device, name: str) -> bool:
    """Whether a name holds the device's family, and nothing that contradicts its memory."""
    family = family_of(device.product).upper()
    details = device.product.upper().split("-")
    wanted = name.upper()
    # GH200 is no H200, and H1000 would be no H100.
    if not re.search(rf"(?<![A-Z0-9]){family.replace('-', '[ -]?')}(?![0-9])", wanted):
        return False
    if any((word in details) is not bool(re.search(rf"\b{word}", wanted)) for word in _OTHER_MEMORY):
        return False
    numbers = re.findall(r"(?<![A-Z0-9.])(\d+)(?: ?GI?B)?(?![A-Z0-9.])", wanted)
    # 6000 of RTX PRO 6000 and 480GB of GH200 480GB are no memory of the GPU.
    named = set(re.findall(r"\d+", device.product))
    asked = [int(number) for number in numbers if int(number) >= _SMALLEST_GIB and number not in named]
    return all(abs(device.total_bytes / GIB / number - 1) <= _ROUNDED_NAME for number in asked)
