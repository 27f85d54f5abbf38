"""Models and pairs that the sizing tests share."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from specdecode_operator.enums import Precision
from specdecode_operator.sizing.catalogue import find_geometry
from specdecode_operator.sizing.geometry import ModelGeometry
from specdecode_operator.sizing.memory.budget import EngineLimits, Pair
from tests.support.llama import ARTICLE_LIMITS, LLAMA_8B_CONFIG

PairFactory = Callable[..., Pair]


def _catalogued(model_id: str) -> ModelGeometry:
    geometry = find_geometry(model_id)
    assert geometry is not None
    return geometry


@pytest.fixture(scope="session")
def llama_70b() -> ModelGeometry:
    return _catalogued("meta-llama/Llama-3.1-70B-Instruct")


@pytest.fixture(scope="session")
def llama_8b() -> ModelGeometry:
    return _catalogued("meta-llama/Llama-3.1-8B-Instruct")


@pytest.fixture(scope="session")
def llama_1b() -> ModelGeometry:
    return _catalogued("meta-llama/Llama-3.2-1B-Instruct")


@pytest.fixture(scope="session")
def limits() -> EngineLimits:
    """The settings of the article's case: length 8192, 256 sequences, 92 %."""
    return ARTICLE_LIMITS


@pytest.fixture(scope="session")
def make_pair(llama_70b: ModelGeometry, llama_8b: ModelGeometry, limits: EngineLimits) -> PairFactory:
    """Return a maker of 70B pairs: precisions by name, no draft where the draft's is None, limits by keyword."""

    def make(target: str = "BF16", draft: str | None = "BF16", **changed_limits: Any) -> Pair:
        return Pair(
            target=llama_70b,
            target_precision=Precision(target),
            draft=None if draft is None else llama_8b,
            draft_precision=None if draft is None else Precision(draft),
            method="none" if draft is None else "draft_model",
            num_speculative_tokens=0 if draft is None else 5,
            limits=replace(limits, **changed_limits),
        )

    return make


@pytest.fixture
def llama_config() -> dict[str, Any]:
    """Return the config.json of a small dense Llama, to be spoilt by a test."""
    return {**LLAMA_8B_CONFIG}
