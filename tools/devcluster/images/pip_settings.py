"""How pip inside an image build reaches the package index: as pip on this machine does."""

import configparser
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OPTIONS = (
    "cert", "client-cert", "default-timeout", "extra-index-url", "find-links", "index-url",
    "no-index", "proxy", "retries", "timeout", "trusted-host",
)  # fmt: skip
"""The options of pip that say how to reach an index; the others stay outside."""

SECTIONS = ("global", "install")
CA_VARIABLES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")
"""Where pip looks for certificates when its own settings name none."""

PIP_CONF = "/etc/pip.conf"


@contextmanager
def pip_volumes() -> Iterator[dict[Path, str]]:
    """Yield what a build has to see of this machine (path here: path inside), gone afterwards.

    The settings may hold passwords: they are in a file that only root reads, and never in a layer.
    """
    options = pip_options()
    with tempfile.TemporaryDirectory(prefix="specdecode-pip-") as folder:
        conf = Path(folder) / "pip.conf"
        conf.touch(mode=0o600)
        conf.write_text("\n".join(["[global]", *(f"{k} = {v}" for k, v in options.items())]) + "\n")
        yield {conf: PIP_CONF} | {path: str(path) for path in _local_paths(options)}


def pip_options() -> dict[str, str]:
    """Return the options that pip on this machine would use, from its files and its environment."""
    parser = configparser.RawConfigParser()
    parser.read(_config_files())
    options: dict[str, str] = {}
    for section in SECTIONS:
        if parser.has_section(section):
            options |= dict(parser.items(section))
    for option in OPTIONS:
        if value := os.environ.get("PIP_" + option.upper().replace("-", "_")):
            options[option] = value
    for variable in CA_VARIABLES:
        if value := os.environ.get(variable):
            options.setdefault("cert", value)
    # A value of several lines has to stay indented.
    return {k: v.replace("\n", "\n  ") for k, v in options.items() if k in OPTIONS}


def _config_files() -> list[Path]:
    """Return pip's configuration files, the strongest last (pip's documentation, "Configuration")."""
    home = Path.home()
    config_home = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    files = [Path("/etc/xdg/pip/pip.conf"), Path(PIP_CONF), home / ".pip/pip.conf", config_home / "pip/pip.conf"]
    if chosen := os.environ.get("PIP_CONFIG_FILE"):
        files.append(Path(chosen))
    return files


def _local_paths(options: dict[str, str]) -> list[Path]:
    words = " ".join(options.get(name, "") for name in ("cert", "client-cert", "find-links")).split()
    return [Path(word) for word in words if word.startswith("/") and Path(word).exists()]
