"""Write the recording rules and the Grafana dashboard of the chart from the definitions of the figures."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from specdecode_operator.stats.figures import FIGURES, TPOT_LIMIT, TTFT_LIMIT, Figure, find_figure
from specdecode_operator.stats.measures import DEPLOYMENT_LABEL, DEPLOYMENT_LEVEL, Scope
from specdecode_operator.vllm.settings_watch import LABEL, METRIC

FOLDER: Final = Path(__file__).parents[3] / "charts/specdecode-operator/files"
_HEAD: Final = "# Written by ./just docs from operator/stats/figures.py, which defines each metric.\n"
_WIDTH: Final = 24
_HEIGHT: Final = 8
_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_CHOSEN: Final = f'{{namespace=~"$namespace", {DEPLOYMENT_LABEL}=~"$deployment"}}'
_LEGEND: Final = f"{{{{namespace}}}}/{{{{{DEPLOYMENT_LABEL}}}}}"
_LIMITS: Final = {
    TTFT_LIMIT.removeprefix("$"): ("TTFT limit, s", ("0.1", "0.25", "0.5", "1.0", "2.5", "5.0", "10.0"), "1.0"),
    TPOT_LIMIT.removeprefix("$"): ("TPOT limit, s", ("0.01", "0.025", "0.05", "0.075", "0.1", "0.2", "0.5"), "0.05"),
}
"""Buckets of vLLM's histograms (vllm/v1/metrics/buckets.py as of 0.33): title, values, and what is chosen at first."""

_ROWS: Final[tuple[tuple[str, tuple[tuple[str, ...], ...]], ...]] = (
    (
        "Client experience",
        (
            ("output_tokens_per_second",),
            ("answered_requests_per_second",),
            ("time_to_first_token_within_limit", "time_per_output_token_within_limit"),
            ("time_to_first_token_p50", "time_to_first_token_p99"),
            ("time_per_output_token_p50", "time_per_output_token_p99"),
            ("time_per_output_token_spread",),
        ),
    ),
    (
        "Speculation",
        (
            ("mean_acceptance_length",),
            ("acceptance_rate",),
            ("acceptance_rate_by_position",),
            ("drafted_tokens_per_draft",),
            ("rejected_draft_tokens_per_second",),
            ("prefix_cache_hit_rate",),
        ),
    ),
    ("Load", (("running_requests", "waiting_requests"), ("kv_cache_usage",), ("preemptions_per_second",))),
)
"""Panels by row, each with the figures that it shows."""

_OPERATOR: Final = (
    (
        "Deployments without a ready engine, by reason",
        'max by (reason) (specdecode_deployments{job="specdecode-operator", condition="Available", status="False"})',
        "{{reason}}",
        "short",
    ),
    (
        "Deployments by condition that is not True",
        'specdecode_deployments{job="specdecode-operator", status!="True"}',
        "{{condition}} {{reason}}",
        "short",
    ),
    (
        "Settings that vLLM changed at startup",
        f"max by ({', '.join(DEPLOYMENT_LEVEL)}, {LABEL}) ({METRIC}{_CHOSEN}) == 1",
        f"{_LEGEND} {{{{{LABEL}}}}}",
        "short",
    ),
    ("Plans by verdict", 'specdecode_plans{job="specdecode-operator"}', "{{verdict}}", "short"),
    ("Captures by phase", 'specdecode_captures{job="specdecode-operator"}', "{{phase}}", "short"),
    (
        "Predicted minus reported KV cache",
        'specdecode_budget_residual_bytes{job="specdecode-operator"}',
        "{{product}} {{engine_version}} TP {{tensor}}",
        "bytes",
    ),
    (
        "Reconciles",
        'sum by (kind, outcome) (rate(specdecode_reconcile_duration_seconds_count{job="specdecode-operator"}[5m]))',
        "{{kind}} {{outcome}}",
        "ops",
    ),
    (
        "Reconcile duration, P99",
        (
            "histogram_quantile(0.99, sum by (kind, le)"
            ' (rate(specdecode_reconcile_duration_seconds_bucket{job="specdecode-operator"}[5m])))'
        ),
        "{{kind}}",
        "s",
    ),
)
"""Panels of the operator's own metrics: title, expression, legend, unit."""


def files() -> dict[str, str]:
    """Return the texts of the files by name."""
    rules = yaml.safe_dump(recording_rules(), sort_keys=False, width=1000, allow_unicode=True)
    return {
        "recording-rules.yaml": f"{_HEAD}{rules}",
        "dashboard.json": f"{json.dumps(dashboard(), indent=2, ensure_ascii=False)}\n",
    }


def recording_rules() -> dict[str, Any]:
    """Return the recorded figures, as a file of rules of Prometheus."""
    rules = [
        {"record": figure.recorded(level), "expr": figure.promql(Scope(level))}
        for figure in FIGURES
        for level in figure.levels
    ]
    return {"groups": [{"name": "specdecode-figures", "rules": rules}]}


def dashboard() -> dict[str, Any]:
    """Return the dashboard; figures without a limit use their recorded series."""
    return {
        "uid": "specdecode",
        "title": "Speculative decoding",
        "tags": ["vllm", "specdecode"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": list(_variables())},
        "panels": list(_panels()),
    }


def _variables() -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    output = find_figure("output_tokens_per_second").recorded()
    chosen = f'{output}{{namespace=~"$namespace"}}'
    for name, label, query in (
        ("namespace", "Namespace", f"label_values({output}, namespace)"),
        ("deployment", "Deployment", f"label_values({chosen}, {DEPLOYMENT_LABEL})"),
    ):
        yield {
            "name": name,
            "label": label,
            "type": "query",
            "datasource": _SOURCE,
            "query": query,
            "refresh": 2,
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "current": {"text": "All", "value": "$__all"},
        }
    for name, (label, values, chosen) in _LIMITS.items():
        options = [{"text": value, "value": value, "selected": value == chosen} for value in values]
        yield {
            "name": name,
            "label": label,
            "type": "custom",
            "query": ",".join(values),
            "options": options,
            "current": {"text": chosen, "value": chosen},
        }


def _panels() -> Iterator[dict[str, Any]]:
    top, number = 0, 1
    rows = [(title, [_figures_panel(names) for names in panels]) for title, panels in _ROWS]
    rows.append(
        (
            "Objects and operator",
            [_panel(title, "", unit, [(query, legend)]) for title, query, legend, unit in _OPERATOR],
        )
    )
    for title, panels in rows:
        position = {"x": 0, "y": top, "w": _WIDTH, "h": 1}
        yield {"id": number, "type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": position}
        number, top = number + 1, top + 1
        for place, panel in enumerate(panels):
            x, y = place % 3 * 8, top + place // 3 * _HEIGHT
            yield {"id": number, **panel, "gridPos": {"x": x, "y": y, "w": 8, "h": _HEIGHT}}
            number += 1
        top += -(-len(panels) // 3) * _HEIGHT


def _figures_panel(names: tuple[str, ...]) -> dict[str, Any]:
    figures = [find_figure(name) for name in names]
    title = ", ".join(figure.title for figure in figures)
    about = "\n\n".join(" ".join(filter(None, (figure.definition, figure.caveat))) for figure in figures)
    queries = [(_query(figure), _legend(figure, alone=len(figures) == 1)) for figure in figures]
    return _panel(title, about, figures[0].grafana_unit, queries)


def _query(figure: Figure) -> str:
    if figure.levels:
        return f"{figure.recorded()}{_CHOSEN}"
    output = find_figure("output_tokens_per_second").recorded()
    return f"({figure.promql()}) and on ({', '.join(DEPLOYMENT_LEVEL)}) {output}{_CHOSEN}"


def _legend(figure: Figure, *, alone: bool) -> str:
    position = " {{position}}" if "by_position" in figure.name else ""
    return f"{_LEGEND}{position}" if alone else f"{_LEGEND} {figure.title}"


def _panel(title: str, about: str, unit: str, queries: list[tuple[str, str]]) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + place), "datasource": _SOURCE, "expr": expr, "legendFormat": legend}
        for place, (expr, legend) in enumerate(queries)
    ]
    defaults = {"unit": unit, "min": 0} if unit != "bytes" else {"unit": unit}
    return {
        "type": "timeseries",
        "title": title,
        "description": about,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": targets,
    }


def write() -> None:
    """Write the files."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in files().items():
        (FOLDER / name).write_text(text)
