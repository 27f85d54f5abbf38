"""A version of vLLM that does not exist: the newest one, by links, with a few lines written otherwise."""

from collections.abc import Mapping
from pathlib import Path


def make(package: Path, folder: Path, version: str, edits: Mapping[str, tuple[str, str]]) -> Path:
    """Return a folder of packages with a vLLM of a version; each edit replaces one text in a file by another."""
    made = folder / "vllm"
    numbers = ", ".join([*version.split("."), "0"])
    (folder / f"vllm-{version}.0+cpu.dist-info").mkdir(parents=True)
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}.0+cpu\n"
    (folder / f"vllm-{version}.0+cpu.dist-info/METADATA").write_text(metadata)
    _link(package, made, {Path(name).parts for name in ("_version.py", *edits)})
    (made / "_version.py").write_text(f'__version__ = version = "{version}.0"\n__version_tuple__ = ({numbers})\n')
    for name, (old, new) in edits.items():
        text = (package / name).read_text(encoding="utf-8")
        assert old in text, f"{name} of the newest vLLM has no {old}"
        (made / name).write_text(text.replace(old, new), encoding="utf-8")
    return folder


def _link(source: Path, target: Path, without: set[tuple[str, ...]]) -> None:
    """Link what a folder holds, but for the files that are left out: folders on the way to them are made."""
    target.mkdir()
    for each in source.iterdir():
        below = {parts[1:] for parts in without if parts[0] == each.name}
        if not below:
            (target / each.name).symlink_to(each)
        elif each.is_dir():
            _link(each, target / each.name, below)
