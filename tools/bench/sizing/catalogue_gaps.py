"""What the catalogue lacks of vllm-project/recipes and of vLLM's registry, as the page of an issue.

Both are read as data: YAML files, and the literals of registry.py without importing it. ``refreshed`` adds what a new
version registers to operator/sizing/data/registry.json.
"""

import argparse
import ast
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import yaml

from specdecode_operator.sizing.catalogue import hub_ids
from specdecode_operator.sizing.data_files import read_data
from specdecode_operator.sizing.families.architectures import ARCHITECTURES
from specdecode_operator.vllm.versions import release

_TARGETS: Final = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS")
_HEADS: Final = ("_SPECULATIVE_DECODING_MODELS",)
_GENERATE: Final = (*_TARGETS, *_HEADS, "_TRANSFORMERS_SUPPORTED_MODELS")
"""Tables of the classes in registry.json: models that generate text, and drafts."""
_SPECULATION: Final = "--speculative-config"


def recipe_models(recipes: Path) -> Mapping[str, tuple[str, ...]]:
    """Return the models of each recipe that speculates, by its path: targets of its variants, and drafts.

    Parameters
    ----------
    recipes
        A checkout of vllm-project/recipes.

    Raises
    ------
    ValueError
        When no recipe in it speculates, as its layout changed.
    """
    found = {}
    for path in sorted(recipes.glob("models/*/*.yaml")):
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
        speculation = (recipe.get("features") or {}).get("spec_decoding")
        if speculation:
            models = [*_targets(recipe), *_drafts(speculation)]
            found[path.relative_to(recipes).as_posix()] = tuple(dict.fromkeys(models))
    if not found:
        raise ValueError(f"{recipes}: no recipe has features.spec_decoding; did the layout of the repository change?")
    return found


def _targets(recipe: Mapping[str, Any]) -> Iterator[str]:
    default = recipe["model"]["model_id"]
    yield default
    for variant in (recipe.get("variants") or {}).values():
        yield (variant or {}).get("model_id") or default


def _drafts(speculation: Mapping[str, Any]) -> Iterator[str]:
    for mode in (speculation.get("modes") or {"": speculation}).values():
        arguments = [str(each) for each in mode.get("args") or ()]
        for flag, value in pairwise(arguments):
            if flag == f"{_SPECULATION}.model":
                yield value
            draft = yaml.safe_load(value).get("model") if flag == _SPECULATION else None
            if draft:
                yield str(draft)


def registered(registry: Path, tables: Iterable[str]) -> frozenset[str]:
    """Return the class names that these tables of vLLM's registry.py map.

    Raises
    ------
    ValueError
        When a table is missing.
    """
    found: dict[str, list[Any]] = {}
    for statement in ast.parse(registry.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            keys = [key.value for key in statement.value.keys if isinstance(key, ast.Constant)]
            found |= {target.id: keys for target in statement.targets if isinstance(target, ast.Name)}
    missing = [name for name in tables if name not in found]
    if missing:
        raise ValueError(f"{registry}: has no {missing[0]}; did the layout of the registry change?")
    return frozenset(str(key) for name in tables for key in found[name])


def refreshed(data: Mapping[str, Any], registry: Path, version: str, transformers: Path) -> dict[str, Any]:
    """Return the content of registry.json with what a newer version registers, and what it no longer has.

    Parameters
    ----------
    data
        Content of registry.json; it is returned as it is if it has the version already.
    registry
        The version's registry.py.
    transformers
        The package transformers that runs beside it.
    """
    if release(version) <= release(data["newest"]):
        return dict(data)
    minor = ".".join(map(str, release(version)))
    since, until = _by_name(data["since"]), _by_name(data["until"])
    every, now = {*data["classes"], *since, *until}, registered(registry, _GENERATE)
    new, gone = now - every, every - {*until} - now
    since |= dict.fromkeys(new, minor)
    # A class that is back loses its end: the versions between are not told apart.
    until = {name: last for name, last in until.items() if name not in now} | dict.fromkeys(gone, data["newest"])
    return {
        **data,
        "newest": minor,
        "classes": sorted((every | now) - {*since, *until}),
        "since": _by_version(since),
        "until": _by_version(until),
        "in_transformers": sorted({*data["in_transformers"], *((new | gone) & transformers_classes(transformers))}),
    }


def transformers_classes(package: Path) -> frozenset[str]:
    """Return the names of the classes in the models of the package transformers."""
    texts = (path.read_text(encoding="utf-8") for path in package.glob("models/*/modeling_*.py"))
    return frozenset(name for text in texts for name in re.findall(r"^class (\w+)\(", text, re.MULTILINE))


def _by_name(versions: Mapping[str, Iterable[str]]) -> dict[str, str]:
    return {name: version for version, names in versions.items() for name in names}


def _by_version(names: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {version: [] for version in sorted({*names.values()}, key=release)}
    for name in sorted(names):
        found[names[name]].append(name)
    return found


def _changed(data: Mapping[str, Any], registry: Path) -> tuple[list[str], list[str]]:
    """Return the classes that a registry has and the newest version of registry.json has not, and the other way."""
    since, until = _by_name(data["since"]), _by_name(data["until"])
    newest, now = {*data["classes"], *since} - {*until}, registered(registry, _GENERATE)
    return sorted(now - newest), sorted(newest - now)


def registry_text(data: Mapping[str, Any]) -> str:
    """Return the content of registry.json as its text: lists of names in lines of 118 characters."""
    return "{\n" + ",\n".join(f"  {json.dumps(key)}: {_value(value, 2)}" for key, value in data.items()) + "\n}\n"


def _value(value: Any, indent: int) -> str:
    inner, outer = " " * (indent + 2), " " * indent
    if isinstance(value, Mapping):
        rows = (f"{inner}{json.dumps(key)}: {_value(each, indent + 2)}" for key, each in value.items())
        return "{\n" + ",\n".join(rows) + f"\n{outer}}}"
    if isinstance(value, str):
        return json.dumps(value)
    names = ", ".join(map(json.dumps, value))
    lines = textwrap.fill(names, 118, initial_indent=inner, subsequent_indent=inner, break_on_hyphens=False)
    return f"[\n{lines}\n{outer}]"


def page(recipes: Path, registry: Path, version: str, data: Mapping[str, Any] | None = None) -> str:
    """Return the page: a title, models of recipes without an entry, and classes that sizing does not implement.

    It also lists what the registry of the version changes of ``data``, the content of registry.json. Empty if nothing
    is missing.
    """
    classes = read_data("registry.json") if data is None else data
    new, gone = _changed(classes, registry)
    known = set(hub_ids())
    lacking = {
        path: missing
        for path, models in recipe_models(recipes).items()
        if (missing := [model for model in models if model not in known])
    }
    heads = sorted(registered(registry, _HEADS) - set(ARCHITECTURES))
    targets = sorted(registered(registry, _TARGETS) - set(ARCHITECTURES))
    if not (lacking or heads or targets or new or gone):
        return ""
    count = sum(map(len, lacking.values()))
    lines = [
        "# Catalogue: models and classes that it lacks",
        "",
        f"Compared with vllm-project/recipes and the registry of vLLM {version}.",
        "",
        f"## {count} models of recipes that speculate have no entry",
        "",
        *(f"- {path}: {', '.join(f'`{model}`' for model in models)}" for path, models in lacking.items()),
        "",
        *_classes("classes of drafts are not implemented by sizing", heads),
        *_classes("classes of targets are not implemented by sizing", targets),
        *_classes(
            f"classes are new since the registry.json of vLLM {classes['newest']}: `./just engine-new` adds them", new
        ),
        *_classes("classes are gone since then: `./just engine-new` writes their last version", gone),
    ]
    return "\n".join(lines)


def _classes(what: str, names: list[str]) -> Iterator[str]:
    yield f"## {len(names)} {what}"
    yield ""
    yield from (f"- `{name}`" for name in names)
    yield ""


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipes", type=Path, help="checkout of vllm-project/recipes")
    parser.add_argument("registry", type=Path, help="vllm/model_executor/models/registry.py of the newest release")
    parser.add_argument("--vllm", default="newest", help="the version of that file")
    arguments = parser.parse_args()
    print(page(arguments.recipes, arguments.registry, arguments.vllm), end="")


if __name__ == "__main__":
    main()
