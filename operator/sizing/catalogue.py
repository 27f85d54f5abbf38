"""Catalogue of models whose config.json ships with the operator, and of their published draft heads."""

import difflib
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Final

from specdecode_operator.enums import METHODS_WITH_DRAFT
from specdecode_operator.sizing.data_files import data_files, read_data
from specdecode_operator.sizing.errors import GeometryError
from specdecode_operator.sizing.families.architectures import geometry_from_config, head_from_config
from specdecode_operator.sizing.families.draft_heads import method_of_head
from specdecode_operator.sizing.geometry import ModelGeometry
from specdecode_operator.sizing.result_cache import MEMO_SIZE

_RANGE: Final = re.compile(r"\{(\d+)\.\.(\d+)\}")
"""How the data files shorten module names that differ by a number only, as in ``layers.{0..47}.mlp.gate``."""


_PRECISION_SUFFIX: Final = re.compile(
    r"[-_.](bf16|fp8|fp4|nvfp4|mxfp4|int4|int8|awq|gptq|bnb|4bit|8bit|w\d+a\d+|quantized|dynamic|block|autoround)$"
)
"""How the precision of a checkpoint is named at the end of its id."""

_ALIKE: Final = 0.7
"""From where on two words are taken for one that was misspelt."""


@dataclass(frozen=True)
class CatalogueEntry:
    """One model of the catalogue."""

    # Its name on the model hub; a draft head that is on no hub is named ``repository:path`` of its config
    model_id: str
    source: str  # Where the config.json was read
    config: Mapping[str, Any]  # The keys of that config.json that decide memory or identity
    quantization: str  # How the published checkpoint is stored: quant_method, or none
    quantization_source: str  # Where that is said: config.json, or the hub's page


@dataclass(frozen=True)
class PublishedHead:
    """A draft head on the hub."""

    head: str  # Its hub id
    method: str  # How it proposes: eagle3 and so on
    targets: tuple[str, ...]  # Hub ids of what it was made for
    shape: str  # Entry of the catalogue that has its shape
    source: str  # Where its makers name it and its target


@dataclass(frozen=True)
class KnownDraft:
    """A draft that is published or recommended for a target."""

    draft: str | None  # Its hub id; None where the target's own checkpoint holds its layers
    method: str  # How it proposes: mtp, eagle3 and so on
    tokens: int | None  # Tokens proposed a step that the source recommends
    source: str  # Where the draft and its target are named


@lru_cache(maxsize=MEMO_SIZE)
def find_geometry(model_id: str, method: str | None = None) -> ModelGeometry | None:
    """Return the geometry of the model with exactly this hub id, or None.

    ``method`` says how the config.json of a draft head is read; None for a model of its own.

    Raises
    ------
    GeometryError
        When sizing does not know the architecture of this model yet.
    """
    entry = find_entry(model_id)
    if entry is None:
        return None
    head_method = _method_of_draft(model_id)
    # A head's own config.json may have the architecture of what it was made for: the method tells them apart.
    if head_method is not None:
        return head_from_config(model_id, entry.config, head_method)
    geometry = geometry_from_config(model_id, entry.config)
    read_as_head = method is not None and method_of_head(geometry) is not None
    return head_from_config(model_id, entry.config, method or "") if read_as_head else geometry


@lru_cache(maxsize=MEMO_SIZE)
def find_entry(model_id: str) -> CatalogueEntry | None:
    """Return what the catalogue holds of the model with exactly this hub id, or None.

    A published draft head has the shape that its makers' training configuration says.
    """
    shape = next((head.shape for head in published_heads() if head.head == model_id), model_id)
    raw = _raw_entries().get(shape)
    if raw is None:
        return None
    stored = (raw["quantization"], raw["quantization_source"])
    return CatalogueEntry(model_id, raw["source"], _unfold(raw["config"]), *stored)


@cache
def published_heads() -> tuple[PublishedHead, ...]:
    """Return the draft heads on the hub of which it is known what target they were made for."""
    return tuple(
        PublishedHead(entry["head"], entry["method"], tuple(entry["targets"]), entry["shape"], entry["source"])
        for entry in read_data("draft_heads.json")["heads"]
    )


def made_for(model: ModelGeometry) -> tuple[str, ...]:
    """Return the hub ids of what a draft head was made for, as its makers or its config.json say; empty if neither do.

    A model of its own was made for none.
    """
    if model.head is None:
        return ()
    published = next((each.targets for each in published_heads() if each.head == model.name), ())
    named = model.head.verifier
    return published if named is None or named in published else (*published, named)


def is_variant(model_id: str, of: str) -> bool:
    """Whether a model has another's name, or a name that begins with it; owner and precision do not count."""
    name, base = _base_name(model_id), _base_name(of)
    return name == base or name.startswith((f"{base}-", f"{base}_"))


def is_known_name(model_id: str) -> bool:
    """Whether the catalogue has a model of this name; owner and precision do not count."""
    return _base_name(model_id) in _known_names()


def _base_name(model_id: str) -> str:
    """Return a model's own name without its owner and the precision that it is stored in."""
    name = model_id.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")
    while (shorter := _PRECISION_SUFFIX.sub("", name)) != name:
        name = shorter
    return name


@cache
def _known_names() -> frozenset[str]:
    return frozenset(_base_name(each) for each in hub_ids() if not _is_head(each))


def known_models() -> tuple[str, ...]:
    """Return the hub ids that need no config of their own, sorted."""
    return tuple(sorted(_raw_entries()))


def hub_ids() -> tuple[str, ...]:
    """Return what a target or a draft can be named by: models and published heads, sorted.

    A shape of heads that is on no hub, ``repository:path``, is none of them.
    """
    return tuple(sorted({*(each for each in _raw_entries() if ":" not in each), *(h.head for h in published_heads())}))


def similar_model(model_id: str, *, heads: bool) -> str | None:
    """Return the known id that a slip of the pen would have meant, of a draft head or of a model of its own; or None.

    Numbers and words must be the same: another number is another model, another word another checkpoint. Copies are
    not suggested: their original is.
    """
    written, whole = _parts(model_id), "/" in model_id
    ids = [each for each in hub_ids() if each not in _originals()]
    close = [each for each in ids if _is_slip_of(written, _parts(each if whole else each.rpartition("/")[2]))]
    alike = difflib.get_close_matches(model_id, close, n=len(close) or 1, cutoff=0)
    return next((each for each in alike if _is_head(each) == heads), None)


def same_beginning(model_id: str, *, heads: bool) -> tuple[str, ...]:
    """Return the known ids whose own name is this one, or goes on after it with ``-`` or ``_``, whoever owns them.

    Where there are none, return the known builds of the same model, which differ from this one in precision alone.
    Copies are left out: their original is there.
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


def _method_of_draft(model_id: str) -> str | None:
    """Return how a head that its makers publish or others recommend proposes, or None for any other model."""
    published = next((head.method for head in published_heads() if head.head == model_id), None)
    return published or next(
        (
            each["method"]
            for each in read_data("drafts.json")["drafts"]
            if each.get("draft") == model_id and each["method"] in METHODS_WITH_DRAFT
        ),
        None,
    )


def drafts_by(model_id: str) -> str | None:
    """Return the method by which a draft with this hub id proposes; None if it is no head, or not known."""
    geometry = _sized(model_id)
    method = None if geometry is None else method_of_head(geometry)
    return None if method is None else str(method)


def _is_head(model_id: str) -> bool:
    geometry = _sized(model_id)
    return geometry is not None and geometry.head is not None


def _sized(model_id: str) -> ModelGeometry | None:
    """Return the geometry of a known model that can be sized; None for any other."""
    try:
        return find_geometry(model_id)
    except GeometryError:
        return None


def _parts(model_id: str) -> "Counter[str]":
    return Counter(re.findall(r"\d+(?:\.\d+)*|[a-z]+", model_id.lower()))


def _is_slip_of(written: "Counter[str]", known: "Counter[str]") -> bool:
    """Whether all that differs are misspelt words, and words that stand there already."""
    extra, missing = [list((one - other).elements()) for one, other in ((written, known), (known, written))]
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
    """Return the models that are copies of another entry: the same config and name under another owner or prefix."""
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
