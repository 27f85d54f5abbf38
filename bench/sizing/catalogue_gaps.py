"""What the catalogue lacks of vllm-project/recipes and of vLLM's registry, as the page of an issue.

Both are read as data: YAML files, and the literals of registry.py without importing it.
"""

import argparse
import ast
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import yaml

from specdecode_operator.sizing.families.catalogue import hub_ids
from specdecode_operator.sizing.families.config import ARCHITECTURES

_TARGETS: Final = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS")
_HEADS: Final = ("_SPECULATIVE_DECODING_MODELS",)
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


def page(recipes: Path, registry: Path, version: str) -> str:
    """Return the page: a title, models of recipes without an entry, and classes that sizing does not implement.

    Empty if nothing is missing.
    """
    known = set(hub_ids())
    lacking = {
        path: missing
        for path, models in recipe_models(recipes).items()
        if (missing := [model for model in models if model not in known])
    }
    heads = sorted(registered(registry, _HEADS) - set(ARCHITECTURES))
    targets = sorted(registered(registry, _TARGETS) - set(ARCHITECTURES))
    if not (lacking or heads or targets):
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
        *_classes("classes of drafts", heads),
        *_classes("classes of targets", targets),
    ]
    return "\n".join(lines)


def _classes(what: str, names: list[str]) -> Iterator[str]:
    yield f"## {len(names)} {what} are not implemented by sizing"
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
