"""Findings as files: what repeats one, step by step, for `./just hunt --repeat FILE` and for a person with kubectl."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from hunt.states import Change, State
from hunt.steps import Step


@dataclass(frozen=True)
class Beat:
    """A step, and what goes wrong with the operator meanwhile."""

    step: Step
    fault: str = "none"


def write(file: Path, beats: Sequence[Beat], what: str) -> None:
    """Write what repeats a finding."""
    file.write_text(yaml.safe_dump({"finding": what, "beats": [asdict(beat) for beat in beats]}, sort_keys=False))


def read(file: Path) -> list[Beat]:
    """Return what repeats a finding."""
    return [Beat(_step(each["step"]), each["fault"]) for each in yaml.safe_load(file.read_text())["beats"]]


def as_manifests(beats: Sequence[Beat]) -> str:
    """Return what a person does, one YAML document a step."""
    parts = []
    for number, beat in enumerate(beats):
        fault = f"# beat {number}, meanwhile: {beat.fault}\n" if beat.fault != "none" else f"# beat {number}\n"
        parts.append(fault + beat.step.as_yaml())
    return "---\n".join(parts)


def _step(data: dict[str, Any]) -> Step:
    state = data["state"]
    if state is not None:
        changes = tuple(Change(tuple(each["path"]), each["value"], each["legal"]) for each in state["changes"])
        state = State(state["base"], changes)
    return Step(data["kind"], state, data["number"])
