"""Mixes of layers, drawn at random, whose KV cache is divided."""

import random
from dataclasses import asdict, replace
from typing import Any

from specdecode_operator.sizing.arithmetic import GIB
from specdecode_operator.sizing.memory.kv_pages import CacheKind, KvLayer, KvSettings, LayerRun
from specdecode_operator.sizing.version_rules import NEWEST_VERSION

CASES = 600
LENGTHS = (1, 500, 4096, 8192, 8200, 40_960, 131_072)


def attention(kind: CacheKind, heads: int, width: int, element: int, reach: int = 0) -> KvLayer:
    tensors = 1 if kind is CacheKind.LATENT else 2
    return KvLayer(
        kind,
        token_bytes=tensors * heads * width * element,
        reach_tokens=reach,
        head_width=width,
        element_bytes=element,
    )


def state(draw: random.Random) -> KvLayer:
    columns = draw.choice((0, 8192, 12_288))
    exports_checkpoint, delta_rule = draw.choice(((True, False), (False, False), (False, True)))
    return KvLayer(
        CacheKind.STATE,
        state_bytes=draw.choice((524_288, 1_048_576, 1_073_152)) + 3 * columns,
        state_bytes_per_speculated_token=columns,
        exports_checkpoint=exports_checkpoint,
        delta_rule=delta_rule,
    )


def kinds_of_target(draw: random.Random) -> list[KvLayer]:
    """Return the kinds of layer of one model, in the order in which they repeat."""
    heads, width, element = draw.choice((1, 2, 4, 8)), draw.choice((64, 128, 256)), draw.choice((1, 2))
    full = attention(CacheKind.FULL, heads, width, element)
    latent = attention(CacheKind.LATENT, 1, draw.choice((512, 576)), element)
    window = attention(CacheKind.SLIDING, heads, width, element, draw.choice((128, 1024, 4096)))
    other_window = attention(CacheKind.SLIDING, heads * draw.choice((1, 2, 3)), width, element, 512)
    chunk = attention(CacheKind.CHUNKED, heads, width, element, 8192)
    linear = state(draw)
    return draw.choice(
        (
            [full],
            [latent],
            [window],
            [window, full],
            [window, full],
            [full, other_window],
            [window, other_window, full],
            [chunk, full],
            [linear, full],
            [linear, latent],
            [linear, window, full],
            [linear],
        )
    )


def kinds_of_draft(draw: random.Random, target: list[KvLayer]) -> list[KvLayer]:
    own = attention(CacheKind.FULL, draw.choice((1, 2, 3, 8)), draw.choice((64, 128)), 2)
    window = attention(CacheKind.SLIDING, draw.choice((1, 2, 8)), 128, 2, draw.choice((1024, 2048)))
    return draw.choice(([], [own], [target[-1]], [window], [window, own]))


def case(seed: int, version: str = NEWEST_VERSION) -> dict[str, Any]:
    draw = random.Random(seed)
    target = kinds_of_target(draw)
    pattern = [LayerRun(kind, draw.randint(1, 5)) for kind in target]
    pipeline = draw.choice((1, 1, 1, 2, 3))
    stages = [tuple(pattern * draw.randint(1, 6)) for _ in range(pipeline)]
    drafts = kinds_of_draft(draw, target)
    stages[-1] += tuple(LayerRun(replace(kind, of_draft=True), draw.randint(1, 4)) for kind in drafts)
    tokens = draw.randint(1, 7) if drafts else draw.choice((0, 0, 3))
    reads = bool(drafts) and draw.random() < 0.5
    settings = KvSettings(
        block_size=draw.choice((16, 16, 32, 64)),
        max_num_batched_tokens=draw.choice((2048, 8192)),
        version=version,
        pipeline=pipeline,
        async_scheduling=draw.random() < 0.7,
        v2_runner=draw.random() < 0.7,
        prefix_caching=draw.random() < 0.5,
        num_speculative_tokens=tokens,
        draft_reads_hidden_states=reads,
        prediction_modules=draw.choice((1, 2, 3)) if reads else 0,
        hybrid_manager=draw.random() < 0.8,
        chunked_hybrid=draw.random() < 0.5,
    )
    available = [int(draw.uniform(0.02, 40) * GIB) for _ in stages]
    length = draw.choice(LENGTHS)
    return {"stages": tuple(stages), "settings": settings, "max_model_len": length, "available_bytes": available}


def as_question(one: dict[str, Any]) -> dict[str, Any]:
    stages = [[[asdict(run.layer), run.count] for run in stage] for stage in one["stages"]]
    return one | {"stages": stages, "settings": one["settings"]._asdict()}


def described(one: dict[str, Any]) -> str:
    """Return what a failure says of a case."""
    layers = [" + ".join(f"{run.count} {run.layer.kind.value}" for run in stage) for stage in one["stages"]]
    return f"stages of {' | '.join(layers)}, {one['max_model_len']} tokens, {one['settings']}"
