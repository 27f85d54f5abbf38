"""The figures of a capture that stand in the table at the head of a report."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from specdecode_operator.pictures.figures.timeline import moments
from specdecode_operator.pictures.seen.capture import Capture

_QUANTILES: Final = (50, 90, 99)


@dataclass(frozen=True)
class Measure:
    """One figure with its unit; shares are from 0 to 1."""

    value: float | str
    unit: str = ""


def measures_of(capture: Capture) -> dict[str, Measure]:
    """Return what is known of a capture, by name."""
    identity, requests, steps = capture.identity, capture.requests, capture.steps
    tokens = int(np.sum(requests.output_tokens, dtype=np.float64))
    found = {
        "model": Measure(identity.model or "not known"),
        "GPU": Measure(identity.gpu or "not known"),
        "vLLM": Measure(identity.vllm or "not known"),
        "config hash": Measure(identity.config_hash or "not known"),
        "speculation": Measure(identity.speculation),
        "requests": Measure(len(requests)),
        "output tokens": Measure(tokens),
    }
    rows = moments(requests, 0.0)
    rows = rows[~np.isnan(rows).any(axis=1)]
    if len(rows) and (seconds := float(rows[:, 3].max() - rows[:, 0].min()) / 1000) > 0:
        found["output tokens a second"] = Measure(tokens / seconds, "1/s")
    if requests.bursts.any():
        found["tokens per decode step"] = Measure(requests.mean_burst)
    if steps is not None and steps.acceptance is not None:
        found["acceptance"] = Measure(steps.acceptance, "share")
    for name, column in (("TTFT", requests.ttft_ms), ("TPOT", requests.tpot_ms)):
        values = np.asarray(column)
        values = values[~np.isnan(values)]
        if len(values):
            for share, value in zip(_QUANTILES, np.percentile(values, _QUANTILES), strict=True):
                found[f"{name} P{share}"] = Measure(float(value), "ms")
    return found
