"""Takes the certificate that a server is given as files to ``spec.serving.tlsSecret``."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from specdecode_operator.kube.untyped import mapping, name_of, objects
from specdecode_operator.migration.builder import Outcome, SpecBuilder
from specdecode_operator.migration.flags import Given

_CERTIFICATE, _KEY, _REFRESH = "--ssl-certfile", "--ssl-keyfile", "--enable-ssl-refresh"
_FILES: Final = {_CERTIFICATE: "tls.crt", _KEY: "tls.key"}
"""Keys of a Secret of type kubernetes.io/tls."""


def take_tls(
    flags: Iterable[Given], pod: Mapping[str, Any], container: Mapping[str, Any], builder: SpecBuilder
) -> tuple[list[Given], set[str]]:
    """Take the certificate; return the other flags, and the volumes that the operator mounts itself."""
    flags = list(flags)
    paths = {given.name: given.values[0] for given in flags if given.name in _FILES and given.values}
    for given in flags:
        if given.name == _REFRESH:
            builder.note(Outcome.OPERATOR, " ".join(given.words), "a renewed certificate counts without a restart")
    rest = [given for given in flags if given.name not in {*_FILES, _REFRESH}]
    if not paths:
        return rest, set()
    found = {name: _secret_file(path, pod, container) for name, path in paths.items()}
    secrets = {each[0] for each in found.values() if each is not None}
    keys = {name: each[1] for name, each in found.items() if each is not None}
    shown = " ".join(f"{name} {path}" for name, path in paths.items())
    if len(secrets) == 1 and keys == _FILES:
        (secret,) = secrets
        builder.take(shown, "serving.tlsSecret", {"name": secret})
        return rest, {each[2] for each in found.values() if each is not None}
    fix = "put both into one Secret of type kubernetes.io/tls, whose keys are tls.crt and tls.key, and name it here"
    builder.decide("spec.serving.tlsSecret", shown, fix)
    return rest, set()


def _secret_file(path: str, pod: Mapping[str, Any], container: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Return Secret, key and volume of a file; None for one that comes from elsewhere."""
    folder, _, file = path.rpartition("/")
    mount = next(
        (each for each in objects(container, "volumeMounts") if str(each.get("mountPath")).rstrip("/") == folder), {}
    )
    volume = next((each for each in objects(pod, "volumes") if name_of(each) == mount.get("name")), {})
    secret = mapping(volume, "secret")
    if not isinstance(secret.get("secretName"), str) or mount.get("subPath"):
        return None
    keys = {str(each.get("path")): str(each.get("key")) for each in objects(secret, "items")}
    return secret["secretName"], keys.get(file, file), name_of(volume)
