"""Whether layers share one table of blocks, and what is made of windows beside whole caches."""

from dataclasses import replace

import pytest

from specdecode_operator.sizing.memory.kv_pages import CacheKind, KvLayer, Page, is_uniform, keep_all_tokens

FULL = Page(KvLayer(CacheKind.FULL, 4096), 16, 65_536)
WIDE = Page(KvLayer(CacheKind.FULL, 8192), 16, 131_072)
LATENT = Page(KvLayer(CacheKind.LATENT, 1152), 16, 18_432)
WINDOW = Page(KvLayer(CacheKind.SLIDING, 4096, 1024), 16, 65_536)
STATE = Page(KvLayer(CacheKind.STATE, state_bytes=60_000), 0, 65_536)


def changed(page: Page, **layer: object) -> Page:
    return replace(page, layer=replace(page.layer, **layer))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pages", "uniform"),
    [
        ([FULL, WIDE, LATENT], True),
        ([FULL, WINDOW], False),
        ([WINDOW, WINDOW], True),
        ([WINDOW, changed(WINDOW, reach_tokens=512)], False),
        ([WINDOW, changed(WINDOW, kind=CacheKind.CHUNKED)], False),
        ([STATE, STATE], True),
        ([STATE, replace(STATE, page_bytes=70_000)], False),
        ([STATE, changed(STATE, exports_checkpoint=True)], False),
        ([STATE, FULL], False),
    ],
)
def test_layers_of_one_type_share_a_table(pages: list[Page], *, uniform: bool) -> None:
    assert is_uniform(pages) is uniform


def test_windows_beside_whole_caches_are_managed_as_such() -> None:
    kept = keep_all_tokens([FULL, WINDOW])
    assert kept == [FULL, changed(WINDOW, kind=CacheKind.FULL, reach_tokens=0)]
    assert keep_all_tokens([WINDOW, WINDOW]) == [WINDOW, WINDOW]
    assert keep_all_tokens([WINDOW, STATE]) is None
