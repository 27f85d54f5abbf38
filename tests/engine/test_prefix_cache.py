"""What speculation costs of the prefix cache is what vLLM's own KV cache manager does not find."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from specdecode_operator.enums import Method
from specdecode_operator.sizing.memory.prefix_cache import prefix_tax
from tests.engine.contract_checks import Vllm

BLOCK = 16
PROMPT = 400
SHARED = (0, 1, 15, 16, 17, 31, 32, 33, 47, 48, 160, 161, 162, 163, 164, 175, 350)
METHODS = (
    *(Method.NONE, Method.NGRAM, Method.SUFFIX, Method.DRAFT_MODEL, Method.MEDUSA),
    *(Method.EAGLE, Method.EAGLE3, Method.MTP, Method.DFLASH, Method.DSPARK),
)


def _case(method: Method, window: int | None, chained: bool, shared: int) -> dict[str, Any]:
    name = None if method is Method.NONE else method.value
    given = {"method": name, "k": 3, "modules": 3 if chained else 1, "window": window, "shared": shared}
    return given | {"block": BLOCK, "prompt": PROMPT}


@pytest.fixture(scope="module")
def rows(vllm: Vllm, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, Any], int]]:
    """Return each case with the tokens that vLLM found."""
    kinds = [(method, window, False) for method in METHODS for window in (None, 64)]
    cases = [_case(*kind, shared) for kind, shared in product([*kinds, (Method.MTP, None, True)], SHARED)]
    folder = tmp_path_factory.mktemp("prefix")
    answers = folder / "answers.json"
    script = Path(__file__).with_name("prefix_oracle.py")
    vllm.h100.begin(script, folder / "run", answers, given=json.dumps(cases)).wait()
    return list(zip(cases, json.loads(answers.read_text()), strict=True))


def test_prefix_cache_hits_equal_vllm(vllm: Vllm, rows: list[tuple[dict[str, Any], int]]) -> None:
    wrong = []
    for case, found in rows:
        tax = prefix_tax(f"{vllm.profile.version}.0", case["method"] or "none", BLOCK, 3 if case["modules"] > 1 else 1)
        assert tax is not None
        if tax.found(case["shared"]) != found:
            wrong.append(f"{case}: vLLM finds {found}, we say {tax.found(case['shared'])}")
    assert not wrong, "\n".join(wrong)


def test_eagle3_loses_prefix_cache_hits_and_ngram_none(rows: list[tuple[dict[str, Any], int]]) -> None:
    """The rows could not tell otherwise whether the engine was asked of drafts at all."""
    none, eagle, ngram = (
        [tokens for case, tokens in rows if case["method"] == method] for method in (None, "eagle3", "ngram")
    )
    assert sum(eagle) < sum(none)
    assert ngram == none
