"""Values that a shell offers while somebody types; each looks them up when it is asked, for that takes a while."""


def models(incomplete: str) -> list[str]:
    """Return the models and heads of the catalogue."""
    from specdecode_operator.sizing.families.catalogue import hub_ids  # noqa: PLC0415

    return _beginning(incomplete, list(hub_ids()))


def gpus(incomplete: str) -> list[str]:
    """Return the GPUs whose memory is known, by the names that people use."""
    from specdecode_operator.sizing.base.devices import family_of, known_products  # noqa: PLC0415

    names = [family_of(product) for product in known_products()]
    return _beginning(incomplete, [*names, *known_products()])


def methods(incomplete: str) -> list[str]:
    """Return the methods of speculation."""
    from specdecode_operator.vocabulary import Method  # noqa: PLC0415

    return _beginning(incomplete, list(Method))


def precisions(incomplete: str) -> list[str]:
    """Return what a target may be served in."""
    from specdecode_operator.api.values import Quantization  # noqa: PLC0415

    return _beginning(incomplete, list(Quantization))


def cache_dtypes(incomplete: str) -> list[str]:
    """Return the element types of a KV cache."""
    from specdecode_operator.vocabulary import KvCacheDtype  # noqa: PLC0415

    return _beginning(incomplete, list(KvCacheDtype))


def versions(incomplete: str) -> list[str]:
    """Return the vLLM versions that are known."""
    from specdecode_operator.engine.profiles import KNOWN_VERSIONS  # noqa: PLC0415

    return _beginning(incomplete, list(KNOWN_VERSIONS))


def _beginning(incomplete: str, values: list[str]) -> list[str]:
    found = dict.fromkeys(str(value) for value in values)
    return [value for value in found if value.lower().startswith(incomplete.lower())]
