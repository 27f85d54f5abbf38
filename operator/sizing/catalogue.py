"""Catalogue of models whose config.json ships with the operator, and of their published draft heads."""

import difflib
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import chain
from typing import Any, Final

from specdecode_operator.enums import METHODS_WITH_DRAFT
from specdecode_operator.sizing.data_files import data_files, read_data
from specdecode_operator.sizing.errors import GeometryError
from specdecode_operator.sizing.families.architectures import geometry_from_config, head_from_config
from specdecode_operator.sizing.families.draft_heads import method_of_head
from specdecode_operator.sizing.geometry import ModelGeometry
from specdecode_operator.sizing.result_cache import MEMO_SIZE

_RANGE: Final = re.compile(r"\{(\d+)\.\.(\d+)\}")
"""Short form in the data files of module names that differ only by a number: ``layers.{0..47}.mlp.gate``."""


_PRECISION_SUFFIX: Final = re.compile(
    r"[-_.](bf16|fp8|fp4|nvfp4|mxfp4|int4|int8|awq|gptq|bnb|4bit|8bit|w\d+a\d+|quantized|dynamic|block|autoround)$"
)
"""Suffixes of hub ids that name the precision."""

_ALIKE: Final = 0.7
"""Minimum similarity of a misspelt word."""


@dataclass(frozen=True)
class CatalogueEntry:
    """One model of the catalogue."""

    model_id: str  # Its name on the hub; ``repository:path`` of its config for a draft head that is on no hub
    source: str  # Source of the config.json
    config: Mapping[str, Any]  # The keys of that config.json that decide memory or identity
    quantization: str  # quant_method of the published checkpoint, or none
    quantization_source: str  # config.json, or the hub's page


@dataclass(frozen=True)
class PublishedHead:
    """A draft head on the hub."""

    head: str  # Its hub id
    method: str
    targets: tuple[str, ...]  # Hub ids
    shape: str  # Entry of the catalogue that has its shape
    source: str  # Page of its makers that names it and its target


@dataclass(frozen=True)
class KnownDraft:
    """A draft that is published or recommended for a target."""

    draft: str | None  # Its hub id; None if the target's own checkpoint holds its layers
    method: str
    tokens: int | None  # Tokens per step that the source recommends
    source: str


@lru_cache(maxsize=MEMO_SIZE)
def find_geometry(model_id: str, method: str | None = None) -> ModelGeometry | None:
    """Return the geometry of the model with exactly this hub id, or None.

    ``method`` selects how the config.json of a draft head is read; None for a complete model. Raise GeometryError if
    sizing does not know the architecture of this model.
    """
    entry = find_entry(model_id)
    if entry is None:
        return None
    # A head's own config.json may have the architecture of its target: the method tells them apart.
    head_method = _named_method(model_id)
    if head_method is not None and head_method in METHODS_WITH_DRAFT:
        return head_from_config(model_id, entry.config, head_method)
    geometry = geometry_from_config(model_id, entry.config)
    read_as_head = method is not None and method_of_head(geometry) is not None
    return head_from_config(model_id, entry.config, method or "") if read_as_head else geometry


def _named_method(model_id: str) -> str | None:
    """Return the method that a source names for a draft, whether its size is known or not; None without a source."""
    published = (head.method for head in published_heads() if head.head == model_id)
    listed = (each["method"] for each in read_data("drafts.json")["drafts"] if each.get("draft") == model_id)
    return next(chain(published, listed), None)


@lru_cache(maxsize=MEMO_SIZE)
def find_entry(model_id: str) -> CatalogueEntry | None:
    """Return the entry of the model with exactly this hub id, or None.

    A published draft head has the shape in its authors' training configuration.
    """
    shape = next((head.shape for head in published_heads() if head.head == model_id), model_id)
    raw = _raw_entries().get(shape)
    if raw is None:
        return None
    stored = (raw["quantization"], raw["quantization_source"])
    return CatalogueEntry(model_id, raw["source"], _unfold(raw["config"]), *stored)


@cache
def published_heads() -> tuple[PublishedHead, ...]:
    """Return the draft heads on the hub with known targets."""
    return tuple(
        PublishedHead(entry["head"], entry["method"], tuple(entry["targets"]), entry["shape"], entry["source"])
        for entry in read_data("draft_heads.json")["heads"]
    )


def made_for(model: ModelGeometry) -> tuple[str, ...]:
    """Return the hub ids of the targets of a draft head, from its makers or its config.json; empty for other models."""
    if model.head is None:
        return ()
    published = next((each.targets for each in published_heads() if each.head == model.name), ())
    named = model.head.verifier
    return published if named is None or named in published else (*published, named)


def is_variant(model_id: str, of: str) -> bool:
    """Return whether a model's name equals another's, or starts with it, ignoring owner and precision.

    Two ids with different names are also variants if one published head is listed for both: a quantized checkpoint may
    omit a part of the name, as nvidia/Gemma-4-26B-A4B-NVFP4 omits "it".
    """
    name, base = _base_name(model_id), _base_name(of)
    return (
        name == base
        or name.startswith((f"{base}-", f"{base}_"))
        or any({model_id, of} <= ids for ids in _shared_heads())
    )


@cache
def _shared_heads() -> tuple[frozenset[str], ...]:
    """Return the targets of each published head; a separate draft model serves different targets."""
    drafts = read_data("drafts.json")["drafts"]
    return tuple(frozenset(each["targets"]) for each in drafts if each.get("draft") and each["method"] != "draft_model")


def is_known_name(model_id: str) -> bool:
    """Return whether the catalogue has a model or head of this name, ignoring owner and precision."""
    return _base_name(model_id) in _known_names()


def _base_name(model_id: str) -> str:
    """Return a model's own name without owner and precision."""
    name = model_id.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")
    while (shorter := _PRECISION_SUFFIX.sub("", name)) != name:
        name = shorter
    return name


@cache
def _known_names() -> frozenset[str]:
    return frozenset(map(_base_name, hub_ids()))


def is_gated(model_id: str) -> bool:
    """Return whether the hub is known to serve a model only to accounts that accepted its terms."""
    return model_id.startswith(_gated_prefixes())


@cache
def _gated_prefixes() -> tuple[str, ...]:
    return tuple(entry["prefix"] for entry in read_data("gated.json")["gated"])


def known_models() -> tuple[str, ...]:
    """Return the hub ids that need no config.json from the user, sorted."""
    return tuple(sorted(_raw_entries()))


def hub_ids() -> tuple[str, ...]:
    """Return the names of models and published heads, without shapes that are on no hub (``repository:path``)."""
    return tuple(sorted({*(each for each in _raw_entries() if ":" not in each), *(h.head for h in published_heads())}))


# A search takes 7 ms, and the operator repeats it while a model cannot be read.
@lru_cache(maxsize=MEMO_SIZE)
def similar_model(model_id: str, *, heads: bool) -> str | None:
    """Return the known id of a draft head, or of another model, that a misspelled id means, or None.

    Numbers and words must be equal, because another number or word is another model. Originals are suggested, not
    copies.
    """
    whole = "/" in model_id
    ids = [each for each in hub_ids() if each not in _originals()]
    close = [each for each in ids if _is_misspelt(model_id, each if whole else each.rpartition("/")[2])]
    alike = difflib.get_close_matches(model_id, close, n=len(close) or 1, cutoff=0)
    return next((each for each in alike if _is_head(each) == heads), None)


def same_beginning(model_id: str, *, heads: bool) -> tuple[str, ...]:
    """Return the known ids of any owner whose name is this one, or continues it with ``-`` or ``_``.

    Without one, return the known builds of the same model, which differ only in precision. Copies are omitted in
    favor of their originals.
    """
    name = model_id.rpartition("/")[2].lower()
    own = {each: each.rpartition("/")[2].lower() for each in hub_ids() if each not in _originals()}
    found = [each for each, known in own.items() if known == name or known.startswith((f"{name}-", f"{name}_"))]
    found = found or [each for each in own if _base_name(each) == _base_name(model_id)]
    return tuple(each for each in found if name and _is_head(each) == heads)


def known_drafts(target: str) -> tuple[KnownDraft, ...]:
    """Return the drafts that are named for the model with exactly this hub id, recommended ones first.

    A copy has the drafts of its original.
    """
    target = _originals().get(target, target)
    named = [
        KnownDraft(each.get("draft"), each["method"], each.get("num_speculative_tokens"), each["source"])
        for each in read_data("drafts.json")["drafts"]
        if target in each["targets"]
    ]
    known = {each.draft for each in named}
    published = [
        KnownDraft(head.head, head.method, None, head.source)
        for head in published_heads()
        if target in head.targets and head.head not in known
    ]
    return tuple(sorted([*named, *published], key=lambda each: (each.tokens is None, each.method, each.draft or "")))


def builds_with_own_draft(model_id: str, method: str) -> tuple[str, ...]:
    """Return the known hub ids of the same model whose checkpoints hold the draft of a method (mtp or dspark)."""
    rows = (each for each in read_data("drafts.json")["drafts"] if each["method"] == method and not each.get("draft"))
    named = dict.fromkeys(target for each in rows for target in each["targets"])
    return tuple(each for each in named if each != model_id and is_variant(each, model_id))


def drafts_by(model_id: str) -> str | None:
    """Return the method by which a draft with this hub id proposes; None if it is not known as a draft."""
    if (named := _named_method(model_id)) is not None:
        return named
    geometry = sized_geometry(model_id)
    return None if geometry is None else method_of_head(geometry)


def _is_head(model_id: str) -> bool:
    geometry = sized_geometry(model_id)
    return geometry is not None and geometry.head is not None


def sized_geometry(model_id: str) -> ModelGeometry | None:
    """Return the geometry of a known model that can be sized; None for any other."""
    try:
        return find_geometry(model_id)
    except GeometryError:
        return None


def _is_misspelt(written_id: str, known_id: str) -> bool:
    """Return whether all differences are misspelt or repeated words."""
    written, known = (Counter(re.findall(r"\d+(?:\.\d+)*|[a-z]+", each.lower())) for each in (written_id, known_id))
    extra, missing = list((written - known).elements()), list((known - written).elements())
    if any(part[0].isdigit() for part in (*extra, *missing)):
        return False
    for part in extra:
        meant = difflib.get_close_matches(part, missing, n=1, cutoff=_ALIKE)
        if meant:
            missing.remove(meant[0])
        elif part not in known:
            return False
    return all(part in written for part in missing)


@cache
def _raw_entries() -> dict[str, dict[str, Any]]:
    listed = {entry["id"]: entry for name in data_files("models") for entry in read_data(name)["models"]}
    return {model_id: {**entry, "config": _whole_config(entry, listed)} for model_id, entry in listed.items()}


@cache
def _originals() -> dict[str, str]:
    """Return the originals of copies: entries with the same config and name under another owner or prefix."""
    entries = _raw_entries()
    return {
        model_id: entry["base"]
        for model_id, entry in entries.items()
        if "base" in entry
        and entry["config"] == entries[entry["base"]]["config"]
        and _base_name(model_id) == _base_name(entry["base"])
    }


def _whole_config(entry: Mapping[str, Any], listed: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the config of an entry; a build of another model lists only the keys in which it differs from its base."""
    own: dict[str, Any] = entry["config"]
    return {**_whole_config(listed[entry["base"]], listed), **own} if "base" in entry else own


def _unfold(value: Any) -> Any:
    """Return the value with every shortened name of its lists and keys written out."""
    match value:
        case dict():
            return {name: _unfold(inner) for key, inner in value.items() for name in _names(key)}
        case list():
            return [inner for item in value for inner in (_names(item) if isinstance(item, str) else [_unfold(item)])]
        case _:
            return value


def _names(shortened: str) -> list[str]:
    found = _RANGE.search(shortened)
    if found is None:
        return [shortened]
    before, after = shortened[: found.start()], shortened[found.end() :]
    numbers = range(int(found[1]), int(found[2]) + 1)
    return [name for number in numbers for name in _names(f"{before}{number}{after}")]
