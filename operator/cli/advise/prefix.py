"""What the draft costs of the prefix cache, by the options of `advise`."""

from typing import Final

import typer

from specdecode_operator.cli.advise.measured import Measured
from specdecode_operator.cli.outputs.advise import PrefixCacheOutput
from specdecode_operator.problems import shown

_USUAL_BLOCK: Final = 16
_MTP: Final = "mtp"
_NOTHING: Final = Measured(k=0, acceptance=None, shortened=False, step_ms={})


def prefix_cache(  # noqa: PLR0913  each is an option
    method: str | None,
    version: str | None,
    block_size: int | None,
    shared: int | None,
    speculating: Measured | None,
    *,
    mtp: tuple[int, int] = (1, 1),
) -> PrefixCacheOutput | None:
    """Return the prefix-cache tax of a method; None where no method is known, and nothing else was asked for.

    ``mtp`` are the target's layers that predict tokens, and K: several of them read one after the other.
    """
    recorded = speculating or _NOTHING
    if method is None and recorded.method is None:
        if (version, block_size, shared) != (None, None, None):
            raise typer.BadParameter("is missing: what is lost depends on it", param_hint="--method")
        return None
    from specdecode_operator.versions.table import LAUNCHED_VERSIONS  # noqa: PLC0415  only who asks needs it

    asked = (method or recorded.method or "", version or recorded.version or LAUNCHED_VERSIONS[-1])
    layers, k = mtp
    if layers > 1 and asked[0] != _MTP:
        raise typer.BadParameter(f"{layers}: it is for --method {_MTP} alone", param_hint="--mtp-layers")
    try:
        return _found(*asked, block_size or recorded.block_tokens or _USUAL_BLOCK, shared, k if layers > 1 else 1)
    except typer.BadParameter:
        # What somebody recorded need not be what is known here.
        if method is None and shared is None:
            return None
        raise


def _found(method: str, version: str, block_tokens: int, shared: int | None, chained: int) -> PrefixCacheOutput:
    from specdecode_operator.sizing.base.errors import SizingError  # noqa: PLC0415
    from specdecode_operator.sizing.kv.prefix_cache import prefix_tax  # noqa: PLC0415
    from specdecode_operator.versions.table import LAUNCHED_VERSIONS  # noqa: PLC0415
    from specdecode_operator.vocabulary import Method  # noqa: PLC0415

    if method not in set(Method):
        message = f"{shown(method)}: is no method: use {', '.join(Method)}"
        raise typer.BadParameter(message, param_hint="--method")
    try:
        tax = prefix_tax(version, method, block_tokens, chained)
    except SizingError as error:
        raise typer.BadParameter(str(error), param_hint="--engine-version") from error
    if tax is None:
        message = f"{shown(version)}: was not read for this: name {LAUNCHED_VERSIONS[0]} or later"
        raise typer.BadParameter(message, param_hint="--engine-version")
    return PrefixCacheOutput(
        method=method,
        engine_version=version,
        block_tokens=block_tokens,
        mean_lost_tokens=tax.mean_lost,
        shared_tokens=shared,
        found_tokens=None if shared is None else tax.found(shared),
        lost_tokens=None if shared is None else tax.lost(shared),
    )
