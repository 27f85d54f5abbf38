"""Inspect one vLLM version: sections of names and texts, and the differences between two versions."""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdecode_operator.sizing.families.architectures import READERS
from specdecode_operator.vllm.plugin_bundle import RECORDER
from tests.engine.contract_cases import GOOD, METHODS, PARALLEL, TARGET
from tests.engine.contract_checks import Vllm
from tests.engine.flag_table import keyed

SHAPES = Path(__file__).parent / "shapes_of_engine.py"

UNASKED = "cannot be asked"
"""The section of questions that have no answer."""

REFUSED = ", refused"
"""How the name of an answer ends that is why an engine does not start."""

Sections = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class Difference:
    """What one version says otherwise than the one before."""

    section: str
    name: str
    before: str | None  # None: it had no such thing
    now: str | None


def ask(vllm: Vllm, folder: Path) -> Sections:
    """Return all that is asked of a version; what it needs for that is written into an empty folder.

    What it cannot be asked, because it is no longer where our questions look for it, is a section, too.
    """

    def shapes() -> dict[str, dict[str, str]]:
        plugins, found = folder / "plugins", folder / "shapes.json"
        RECORDER.write(plugins)
        vllm.h100.begin(SHAPES, folder / "copy", found, packages=[plugins]).wait()
        found_out: dict[str, dict[str, str]] = json.loads(found.read_text(encoding="utf-8"))
        return found_out

    def told(question: str, *arguments: Any) -> Any:
        answer = vllm.h100.ask(question, *arguments)
        assert answer.ok, answer.error
        return answer.value

    questions: dict[str, Callable[[], Mapping[str, str]]] = {
        "flags": lambda: {name: _flag(row) for name, row in keyed(told("flags")).items()},
        "environment variables": lambda: dict.fromkeys(told("variables"), "known"),
        "metrics": lambda: _metrics(told("metrics", vllm.line(GOOD["gpu-draft"]))),
        "configuration of an engine": lambda: dict(_started(vllm)),
        "draft classes": lambda: told("draft_classes"),
        "targets": lambda: _targets(told("target_traits", sorted(READERS))),
    }
    sections: dict[str, Mapping[str, str]] = {}
    unasked = {}
    for name, question in questions.items():
        try:
            sections[name] = question()
        except AssertionError as error:
            unasked[name] = _last_words(error)
    try:
        sections |= shapes()
    except AssertionError as error:
        unasked["recorder, messages and signatures"] = _last_words(error)
    return sections | {UNASKED: unasked}


def differences(before: Sections, now: Sections) -> list[Difference]:
    """Return what differs, section by section, by name; of an engine that one of them refuses no more than that.

    A section that one of them could not be asked is left out.
    """
    found = []
    for section in sorted({*before} & {*now}):
        was, is_now = before.get(section, {}), now.get(section, {})
        refused = {name.removesuffix(REFUSED) for name in {*was, *is_now} if name.endswith(REFUSED)}
        for name in sorted({*was, *is_now}):
            known = name.endswith(REFUSED) or name.rpartition(", ")[0] not in refused
            if known and was.get(name) != is_now.get(name):
                found.append(Difference(section, name, was.get(name), is_now.get(name)))
    return found


def _last_words(error: AssertionError) -> str:
    return " ".join(str(error).split())[-300:]


def _flag(row: Mapping[str, Any]) -> str:
    return ", ".join([f"values: {row['values']}", *row.get("aliases", ())])


def _metrics(text: str) -> dict[str, str]:
    """Return kind and labels of every metric of vLLM's."""
    labels = defaultdict(set)
    for name, inside in re.findall(r"^(vllm:\w+)\{(.*)\} ", text, re.MULTILINE):
        labels[name] |= set(re.findall(r'(\w+)="', inside))
    found = {}
    for name, kind in re.findall(r"^# TYPE (vllm:\w+) (\w+)$", text, re.MULTILINE):
        if not name.endswith("_created"):
            own = labels.get(name) or labels.get(f"{name}_bucket") or ()
            found[name] = f"{kind}: {', '.join(sorted(own))}"
    return found


def _started(vllm: Vllm) -> Iterator[tuple[str, str]]:
    """Yield what the contract test's engines are configured as, or why they do not start."""
    cases = {f"method {method.value}": each for method, each in METHODS.items()}
    cases |= {name: each for name, each in (GOOD | PARALLEL).items() if not name.startswith("cpu")}
    asked = {name: vllm.h100.post("start", vllm.line(each)) for name, each in cases.items()}
    asked["no flags at all"] = vllm.h100.post("start", [str(vllm.models / TARGET)])
    for name, answer in asked.items():
        given = answer.get()
        if given.ok:
            yield from ((f"{name}, {key}", str(value)) for key, value in given.value.items())
        else:
            yield f"{name}{REFUSED}", _shortened(given.error or "")


def _shortened(error: str) -> str:
    said = re.sub(r"/tmp/\S+/", "", " ".join(error.split()))
    return said.rpartition("vllm serve: error: ")[2][:300]  # after the parser's usage


def _targets(traits: Mapping[str, Mapping[str, bool]]) -> dict[str, str]:
    return {
        name: ", ".join(trait for trait, has in sorted(can.items()) if has) or "nothing" for name, can in traits.items()
    }
