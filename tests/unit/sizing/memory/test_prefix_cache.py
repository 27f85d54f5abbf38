"""Prefix cache."""

from dataclasses import replace
from statistics import fmean

import pytest

from specdecode_operator.sizing.catalogue import find_geometry
from specdecode_operator.sizing.errors import SizingError
from specdecode_operator.sizing.memory.prefix_cache import Loss, PrefixTax, prefix_tax, prefix_tax_of
from specdecode_operator.sizing.pair import Parallelism
from tests.unit.sizing.conftest import PairFactory


@pytest.mark.parametrize("version", ["0.28.0", "0.32.1"])
@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "dflash", "dspark"])
def test_last_cached_block_is_recomputed_up_to_0_32(version: str, method: str) -> None:
    tax = prefix_tax(version, method, 16)
    assert tax is not None
    assert [tax.found(shared) for shared in (0, 15, 16, 31, 32, 160)] == [0, 0, 0, 0, 16, 144]
    assert [tax.lost(shared) for shared in (15, 16, 160)] == [0, 16, 16]


def test_eagle_and_mtp_need_tokens_after_the_block_in_0_33() -> None:
    ahead, chained, none = (prefix_tax("0.33.0", *given) for given in (("eagle3", 16), ("mtp", 16, 3), ("dflash", 16)))
    assert ahead is not None
    assert chained is not None
    assert none is not None
    assert [ahead.found(shared) for shared in (15, 16, 17, 160, 161)] == [0, 0, 16, 144, 160]
    assert [chained.found(shared) for shared in (160, 162, 163)] == [144, 144, 160]
    assert none.loss is None
    assert none.found(160) == 160


@pytest.mark.parametrize("version", ["0.28.0", "0.33.0"])
@pytest.mark.parametrize("method", ["none", "ngram", "suffix", "draft_model", "medusa"])
def test_other_methods_lose_no_cached_tokens(version: str, method: str) -> None:
    tax = prefix_tax(version, method, 16)
    assert tax is not None
    assert not any(tax.lost(shared) for shared in range(100))
    assert tax.mean_lost == 0


def test_unknown_versions_have_no_prefix_tax() -> None:
    assert prefix_tax("0.27.0", "eagle", 16) is None
    with pytest.raises(SizingError):
        prefix_tax("new", "eagle", 16)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("Qwen/Qwen3-8B", True),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", False),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", False),
    ],
    ids=["every token", "states", "chunks"],
)
def test_state_and_chunk_models_have_no_prefix_tax(make_pair: PairFactory, model: str, told: bool) -> None:
    target = find_geometry(model)
    assert target is not None
    pair = replace(make_pair("BF16", None, engine_version="0.32.0"), target=target)
    assert (prefix_tax_of(pair, Parallelism()) is not None) == told


@pytest.mark.parametrize(
    ("method", "modules", "tokens", "ahead"),
    [("mtp", 1, 3, 1), ("mtp", 3, 3, 3), ("mtp", 3, 1, 1), ("eagle3", 3, 3, 1)],
    ids=["one module", "each after the other", "one token", "modules that do not draft"],
)
def test_chained_mtp_modules_look_farther_ahead(
    make_pair: PairFactory, method: str, modules: int, tokens: int, ahead: int
) -> None:
    target = find_geometry("deepseek-ai/DeepSeek-V3")
    assert target is not None
    pair = make_pair("BF16", "BF16" if method == "eagle3" else None, engine_version="0.33.0")
    target = replace(target, mtp_layers=modules)
    tax = prefix_tax_of(replace(pair, method=method, target=target, num_speculative_tokens=tokens), Parallelism())
    assert tax is not None
    assert tax.ahead_tokens == ahead


@pytest.mark.parametrize(
    "tax",
    [
        PrefixTax(None, 16),
        PrefixTax(Loss.DROPS_BLOCK, 16),
        PrefixTax(Loss.HASHES_AHEAD, 16, 1),
        PrefixTax(Loss.HASHES_AHEAD, 16, 7),
    ],
)
def test_mean_loss_is_the_average_over_all_lengths(tax: PrefixTax) -> None:
    assert fmean(tax.lost(shared) for shared in range(16, 16 * 21)) == pytest.approx(tax.mean_lost)
