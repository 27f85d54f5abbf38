"""When images are built again, and what a build sees of the machine."""

from pathlib import Path

import pytest

from devcluster.host.errors import ClusterError
from devcluster.host.paths import REPOSITORY
from devcluster.images import base, pip_settings, store
from devcluster.images.engine_image import CONTEXT
from devcluster.images.fingerprint import fingerprint, forget_others
from devcluster.images.operator_image import INPUTS


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A folder with a file and a package."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "a.py").write_text("a = 1\n")
    (tmp_path / "recipe").write_text("FROM base\n")
    return tmp_path


def of(sources: Path, *also: str) -> str:
    """The fingerprint of everything in `sources`."""
    return fingerprint(sources, ["recipe", "package"], *also)


def test_fingerprint_stays_while_nothing_changes(sources: Path) -> None:
    before = of(sources)
    (sources / "package" / "__pycache__").mkdir()
    (sources / "package" / "__pycache__" / "a.pyc").write_bytes(b"compiled")
    (sources / "unrelated").write_text("x")
    assert of(sources) == before


@pytest.mark.parametrize("name", ["recipe", "package/a.py", "package/new.py"])
def test_fingerprint_changes_with_content(sources: Path, name: str) -> None:
    before = of(sources)
    (sources / name).write_text("changed\n")
    assert of(sources) != before


def test_fingerprint_changes_with_name_mode_and_base(sources: Path) -> None:
    seen = {of(sources), of(sources, "another base")}
    (sources / "recipe").chmod(0o755)
    seen.add(of(sources))
    (sources / "package" / "a.py").rename(sources / "package" / "b.py")
    seen.add(of(sources))
    assert len(seen) == 4


def test_old_archives_go_and_others_stay(tmp_path: Path) -> None:
    for name in ("operator-1.tar", "operator-2.tar", "engine-1.tar"):
        (tmp_path / name).touch()
    forget_others(tmp_path / "operator-2.tar", "operator-*.tar")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["engine-1.tar", "operator-2.tar"]


def test_every_input_of_the_operator_image_exists() -> None:
    assert [name for name in INPUTS if not (REPOSITORY / name).exists()] == []


def test_everything_that_the_containerfile_copies_is_an_input() -> None:
    lines = (REPOSITORY / "Containerfile").read_text().splitlines()
    copies = [line.split()[1:-1] for line in lines if line.startswith("COPY ") and "--from" not in line]
    assert {name for names in copies for name in names} <= set(INPUTS)
    assert copies


def test_everything_that_the_containerfile_copies_reaches_the_build() -> None:
    allowed = {line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert set(INPUTS) - {"Containerfile", ".dockerignore"} == allowed


def test_engine_command_is_executable() -> None:
    assert (CONTEXT / "vllm").stat().st_mode & 0o111 == 0o111


@pytest.fixture
def no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without pip settings; returns the configuration file that pip is told to read."""
    conf = tmp_path / "pip.conf"
    for option in pip_settings.OPTIONS:
        monkeypatch.delenv("PIP_" + option.upper().replace("-", "_"), raising=False)
    for variable in pip_settings.CA_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    monkeypatch.setenv("PIP_CONFIG_FILE", str(conf))
    return conf


def test_pip_in_a_build_uses_the_machines_index(no_settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_settings.write_text("[global]\nindex-url = https://index.invalid/a\ntimeout = 7\nuser = true\n")
    monkeypatch.setenv("PIP_INDEX_URL", "https://index.invalid/b")
    options = pip_settings.pip_options()
    assert options["index-url"] == "https://index.invalid/b"
    assert options["timeout"] == "7"
    assert "user" not in options


def test_build_sees_certificates_and_settings_only_while_it_runs(no_settings: Path, tmp_path: Path) -> None:
    certificates = tmp_path / "ca.pem"
    certificates.touch()
    no_settings.write_text(
        f"[global]\ncert = {certificates}\nextra-index-url =\n  https://a.invalid\n  https://b.invalid\n"
    )
    with pip_settings.pip_volumes() as volumes:
        assert volumes[certificates] == str(certificates)
        conf = next(here for here, inside in volumes.items() if inside == "/etc/pip.conf")
        assert conf.stat().st_mode & 0o077 == 0
        written = pip_settings.configparser.RawConfigParser()
        written.read(conf)
        assert written["global"]["extra-index-url"].split() == ["https://a.invalid", "https://b.invalid"]
    assert not conf.exists()


def test_base_uses_the_distributions_sources_only(monkeypatch: pytest.MonkeyPatch) -> None:
    debian = "Debian deb http://d.invalid stable main"
    targets = [debian, "Other deb http://o.invalid x main", debian]
    monkeypatch.setattr(base, "apt_get", lambda *_: "\n".join(targets))
    assert base.package_sources() == "deb http://d.invalid stable main\n"


def test_without_root_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store.os, "geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match=r"needs root.*docker build -f Containerfile"):
        store.ensure_builders()
