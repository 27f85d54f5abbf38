"""Counters that grow by known amounts and what each figure is of them, from the cases that promtool is given."""

import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from specdecode_operator.stats.figures import SampleBuffer
from specdecode_operator.vllm.engine_metrics import read_exposition

CASES = Path(__file__).parents[1] / "component/admission/data/figures-test.yaml"
_GROWS = re.compile(r"(\d+)\+(\d+)x\d+")
_EXPECTED = re.compile(r"round\((?P<level>\w+):(?P<figure>\w+)(?::5m)?, ")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_OF_KUBERNETES = {"namespace", "specdecode_deployment", "pod"}


def _case() -> dict:
    (found,) = yaml.safe_load(CASES.read_text())["tests"]
    return dict(found)


def page(pod: str, minute: int) -> str:
    """Return the /metrics of a pod at a minute."""
    lines = []
    for series in _case()["input_series"]:
        name, labels = series["series"].partition("{")[::2]
        if f'pod="{pod}"' not in labels:
            continue
        grows = _GROWS.fullmatch(series["values"])
        value = int(grows[1]) + int(grows[2]) * minute if grows else float(series["values"].partition("x")[0])
        said = [f'{key}="{each}"' for key, each in _LABEL.findall(labels) if key not in _OF_KUBERNETES]
        family = re.sub("_bucket$", "", name)
        kind = "counter" if name.endswith("_total") else "histogram" if name.endswith("_bucket") else "gauge"
        lines.append(f"# TYPE {family} {kind}")
        lines.append(f"{name}{{{','.join(said)}}} {value}")
    return "\n".join(dict.fromkeys(lines)) + "\n"


def hear(looks: SampleBuffer, engine: str, text: str, at_s: float) -> None:
    """Keep what an engine says, where it is time for that."""
    if names := looks.names_due(engine, at_s):
        looks.hear(engine, read_exposition(text, names), at_s)


def expected() -> Iterator[tuple[str, dict[str, float]]]:
    """Yield each figure of the deployment, with its values by position or one."""
    for case in _case()["promql_expr_test"]:
        found = _EXPECTED.match(case["expr"])
        assert found is not None, case
        if found["level"] != "specdecode_deployment":
            continue
        values = {}
        for sample in case["exp_samples"]:
            labels = dict(_LABEL.findall(sample["labels"]))
            if labels["specdecode_deployment"] == "d":
                values[labels.get("position", "")] = float(sample["value"])
        yield found["figure"], values
