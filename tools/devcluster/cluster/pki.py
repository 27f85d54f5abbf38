"""A small certificate authority for one cluster, made with openssl."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from devcluster.host.errors import ClusterError


@dataclass(frozen=True)
class Identity:
    """Who a certificate speaks for.

    Kubernetes takes the user from the common name and the groups from the organizations;
    a server certificate lists the names and addresses that clients use.
    """

    file: str
    common_name: str
    organizations: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()


_NEW_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


def create(directory: Path, identities: list[Identity]) -> None:
    """Make ca.crt, FILE.crt and FILE.key for each identity, and the service account key pair."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    _certificate(directory, "ca", _config(Identity("ca", "specdecode-devcluster"), authority=True), [])
    signing = ["-CA", str(directory / "ca.crt"), "-CAkey", str(directory / "ca.key")]
    for identity in identities:
        _certificate(directory, identity.file, _config(identity, authority=False), signing)
    private, public = directory / "service-accounts.key", directory / "service-accounts.pub"
    _openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", str(private))
    _openssl("pkey", "-in", str(private), "-pubout", "-out", str(public))


def _certificate(directory: Path, file: str, config: str, signing: list[str]) -> None:
    config_file = directory / f"{file}.cnf"
    config_file.write_text(config)
    _openssl(
        "req", "-x509", "-config", str(config_file), "-days", "3650", *signing, *_NEW_KEY,
        "-keyout", str(directory / f"{file}.key"), "-out", str(directory / f"{file}.crt"),
    )  # fmt: skip
    config_file.unlink()


def _config(identity: Identity, *, authority: bool) -> str:
    organizations = [f"{i}.O = {name}" for i, name in enumerate(identity.organizations)]
    alternatives = [f"DNS:{name}" for name in identity.names] + [f"IP:{a}" for a in identity.addresses]
    usage = "keyCertSign" if authority else "digitalSignature"
    return "\n".join([
        "[req]", "prompt = no", "distinguished_name = name", "x509_extensions = extensions",
        "[name]", *organizations, f"CN = {identity.common_name}",
        "[extensions]", f"basicConstraints = critical, CA:{str(authority).upper()}", f"keyUsage = critical, {usage}",
        *([] if authority else ["extendedKeyUsage = serverAuth, clientAuth"]),
        *([f"subjectAltName = {', '.join(alternatives)}"] if alternatives else []),
        "",
    ])  # fmt: skip


def _openssl(*arguments: str) -> None:
    # The machine's own openssl.cnf must not add extensions.
    done = subprocess.run(
        ["openssl", *arguments], capture_output=True, text=True, check=False, umask=0o077,
        env={"PATH": os.environ["PATH"], "OPENSSL_CONF": "/dev/null"},
    )  # fmt: skip
    if done.returncode != 0:
        message = f"openssl {arguments[0]} failed (OpenSSL 3 or newer is needed): {done.stderr.strip()}"
        raise ClusterError(message)
