"""States that objects are brought into: the examples, and what their schema lets people make of them."""

import copy
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from hunt.schema import ABSENT, Body, Field, fields, spec_schema

REPOSITORY: Final = Path(__file__).parents[2]
NAME: Final = "hunted"
"""Of the object in each namespace."""

BASES: Final = ("llama-8b-ngram", "qwen3-8b-eagle3", "llama-70b-fp8", "llama-70b-auto", "qwen3-8b-policy")
"""Examples that run on simulated nodes: their models need not be read."""

_DELAYS: Final = {"delay": "100ms", "jitter-delay": "400ms"}
_STAGES: Final = ("pod-create", "pod-init-container-running", "pod-init-container-completed", "pod-ready")
_SOON: Final = {f"{stage}.stage.kwok.x-k8s.io/{which}": value for stage in _STAGES for which, value in _DELAYS.items()}
_SIMULATED: Final = {
    "metadata": {"annotations": _SOON},
    "spec": {"tolerations": [{"key": "kwok.x-k8s.io/node", "operator": "Exists"}]},
}
"""Lets pods onto nodes that only pretend to run them, and has them pretend fast."""

_LEGAL: Final = 0.8
"""Share of changes that the schema takes: else the operator would see little."""


@dataclass(frozen=True)
class Change:
    """One field, and what is written into it."""

    path: tuple[str, ...]
    value: Any
    legal: bool = True

    def __str__(self) -> str:
        shown = "absent" if self.value == ABSENT else json.dumps(self.value)
        return f"{'.'.join(self.path)}={shown[:40]}{'' if self.legal else ' (illegal)'}"


@dataclass(frozen=True)
class State:
    """One spec: an example, with some fields changed."""

    base: str
    changes: tuple[Change, ...] = ()

    @property
    def legal(self) -> bool:
        """Whether the schema takes it; rules between fields may refuse it all the same."""
        return not any(not change.legal and not self._is_undone(at) for at, change in enumerate(self.changes))

    def _is_undone(self, at: int) -> bool:
        """Whether a later change writes over one."""
        path = self.changes[at].path
        return any(later.path == path[: len(later.path)] for later in self.changes[at + 1 :])

    def body(self) -> Body:
        """Return the object."""
        body = _base(self.base)
        for change in self.changes:
            _write(body["spec"], change.path, copy.deepcopy(change.value))
        return body

    def with_field(self, path: tuple[str, ...], value: Any) -> "State":
        """Return the same with one more legal change."""
        return State(self.base, (*self.changes, Change(path, value)))

    def __str__(self) -> str:
        return " ".join([self.base, *map(str, self.changes)])


class States:
    """A source of states, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311  a seed that repeats a run is no secret
        self._fields = list(fields(spec_schema(REPOSITORY / "crds" / "specdecode.io_specdecodedeployments.yaml")))

    def good(self) -> State:
        """Return an example as it is."""
        return State(self._random.choice(BASES))

    def near(self, state: State) -> State:
        """Return a state one to three changes away from an example or from another state."""
        base = state if self._random.random() < 0.5 else State(state.base)  # noqa: PLR2004  either
        changes = tuple(self._change() for _ in range(self._random.choice((1, 1, 2, 3))))
        return State(base.base, (*base.changes, *changes) if base.legal else changes)

    def illegal(self, state: State) -> State:
        """Return a state that the schema refuses."""
        return State(state.base, (*state.changes, self._change(legal=False)))

    def _change(self, *, legal: bool | None = None) -> Change:
        # What stands high in a spec does most: its parts are drawn less often, the deeper they lie.
        weights = [1 / len(field.path) ** 2 for field in self._fields]
        (field,) = self._random.choices(self._fields, weights)
        legal = self._random.random() < _LEGAL if legal is None else legal
        values = field.legal() if legal else field.illegal()
        return Change(field.path, self._random.choice(values), legal) if values else Change(field.path, ABSENT)


def capture_name(number: int) -> str:
    """Return the name of a capture: of each name there is one, for its data stays."""
    return f"measured-{number}"


def capture_body(seed: int) -> Body:
    """Return a short capture of the object."""
    phases = [{"name": "single", "pattern": "Closed", "concurrency": 1, "requests": 8}]
    workload = {"prompts": {"synthetic": {"promptTokens": 64, "outputTokens": 64}}, "phases": phases}
    spec = {"deployment": NAME, "workload": workload, "seed": seed, "storage": {"size": "1Gi"}, "deadlineSeconds": 600}
    metadata = {"name": capture_name(seed)}
    return {"apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeCapture", "metadata": metadata, "spec": spec}


def count_states() -> int:
    """Return how many states are one change away from the examples."""
    return len(BASES) * sum(len(field.legal()) + len(field.illegal()) for field in _all_fields())


def _all_fields() -> Iterator[Field]:
    return fields(spec_schema(REPOSITORY / "crds" / "specdecode.io_specdecodedeployments.yaml"))


def _base(name: str) -> Body:
    found = yaml.safe_load_all((REPOSITORY / "examples" / f"{name}.yaml").read_text())
    body: Body = next(each for each in found if each and each["kind"] == "SpecDecodeDeployment")
    body["metadata"] = {"name": NAME}
    body["spec"]["podTemplate"] = _SIMULATED
    return body


def _write(spec: Body, path: tuple[str, ...], value: Any) -> None:
    *parents, last = path
    for name in parents:
        below = spec.get(name)
        if not isinstance(below, dict):
            if value == ABSENT:
                return
            below = spec[name] = {}
        spec = below
    if value == ABSENT:
        spec.pop(last, None)
    else:
        spec[last] = value
