"""Create the profile of a new vLLM version, and print the manual steps.

    ./just engine-new 0.34 > page.md
    ./just engine-new newest > page.md    prints no page if the newest release has a profile

The command installs the version in addition to the others, and compares it with the newest earlier version: results
of vLLM's own functions, and the source that the project cites. It creates the profile if it does not exist, and runs
the tests that use an engine. The page, the differences of the source and the output of the tests are in a folder of
the cache, which is printed on standard error.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from devcluster.host.errors import ClusterError
from devcluster.host.paths import cache_dir
from devcluster.host.progress import say, step
from devcluster.images.engine_environment import install_engine_environment
from specdecode_operator.vllm.profiles import find_profile
from specdecode_operator.vllm.versions import LAUNCHED_VERSIONS, release
from tests.engine.contract_cases import write_models
from tests.engine.contract_checks import Vllm
from tests.engine.engine_process import Engine
from tests.engine.engine_versions import REQUIREMENTS, SERVED, at_version
from tests.engine.new_version import profile, suites
from tests.engine.new_version.answers import UNASKED, Sections, ask, differences
from tests.engine.new_version.citations import citations
from tests.engine.new_version.page import Findings, diffs, page
from tests.engine.new_version.sources import compare
from tests.engine.oracle_process import Oracle
from tests.support.engine_settings import replace


@dataclass(frozen=True)
class Installed:
    """A version of vLLM that can be asked."""

    version: str  # major and minor
    engine: Engine

    @property
    def package(self) -> Path:
        """Return the folder of its source."""
        return self.beside("vllm")

    def beside(self, name: str) -> Path:
        """Return the folder of a package that it imports."""
        folders = (*self.engine.more, self.engine.packages)
        return next(folder / name for folder in folders if folder and (folder / name).is_dir())

    def answers(self, oracle: Oracle) -> Sections:
        """Return what it says of itself, where it believes that it runs on H100s."""
        with TemporaryDirectory() as folder:
            models, work = Path(folder, "models"), Path(folder, "work")
            models.mkdir()
            work.mkdir()
            write_models(models)
            return ask(Vllm(find_profile(self.version), oracle, oracle, models), work)


def install(wanted: str) -> tuple[Installed, Installed]:
    """Return the newest version before the wanted one, and that one."""
    version = minor(wanted)
    before = [known for known in LAUNCHED_VERSIONS if release(known) < release(version)]
    if not before:
        raise ValueError(f"vLLM {version} is not compared: {LAUNCHED_VERSIONS[1]} is the oldest that has one before it")
    against = before[-1]
    pinned = REQUIREMENTS / f"{version}.txt"
    if version != SERVED and not pinned.exists():
        pinned.write_text(profile.requirement(wanted), encoding="utf-8")
    engine = Engine.at(Path(install_engine_environment()))
    return Installed(against, at_version(engine, against)), Installed(version, at_version(engine, version))


def examine(
    older: tuple[Installed, Oracle],
    newer: tuple[Installed, Oracle],
    folder: Path,
    table: Path,
    classes: Path | None = None,
) -> Findings:
    """Return all that can be found out of a version without its tests; write its profile, where it has none.

    ``classes`` is registry.json, which gets the classes that the version has more and less; None to leave it.
    """
    (known, known_oracle), (new, oracle) = older, newer
    with step(f"asking vLLM {known.version} and {new.version}"):
        before, now = known.answers(known_oracle), new.answers(oracle)
        # What has no answer is not gone, and nothing is written of it.
        begun = {} if now[UNASKED] else {"flags": profile.flags(oracle, known.version)}
    with step("comparing the source that we name"):
        sources = compare(known.package, new.package, [*citations()], f"vllm/data/{new.version}.json:")
    (folder / "sources.diff").write_text(diffs(sources), encoding="utf-8")
    if begun:
        begun["data"] = profile.facts(before, now, new.version, known.version)
    written = profile.write(new.version, begun, table)
    if classes is not None:
        written += profile.write_classes(new.version, new.package, new.beside("transformers"), classes)
    return Findings(new.version, known.version, differences(before, now), sources, None, written)


def minor(version: str) -> str:
    """Return major and minor of a version."""
    return ".".join(map(str, release(version)))


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(prog="./just engine-new", description=__doc__.partition("\n")[0])
    parser.add_argument("version", help="such as 0.34 or 0.34.1, or newest: the newest release, unless it is known")
    parser.add_argument("--no-tests", action="store_true", help="do not run the tests that ask the engine")
    options = parser.parse_args()
    try:
        wanted = profile.newest_release() if options.version == "newest" else options.version
        if options.version == "newest" and minor(wanted) in LAUNCHED_VERSIONS:
            say(f"vLLM {wanted} is the newest release, and known")
            return
        folder = cache_dir() / "engine-new" / minor(wanted)
        folder.mkdir(parents=True, exist_ok=True)
        known, new = install(wanted)
        with Oracle(known.engine, h100=True) as before, Oracle(new.engine, h100=True) as now:
            found = examine((known, before), (new, now), folder, profile.TABLE, profile.CLASSES)
        if not options.no_tests and (profile.TABLE / "flags" / f"{found.version}.json").exists():
            with step(f"running the tests that ask vLLM {found.version}"):
                found = replace(found, outcome=suites.run(found.version, folder))
    except (ClusterError, ValueError) as error:
        sys.exit(f"engine-new: {error}")
    text = page(found)
    (folder / "page.md").write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    say(f"the page, the differences of the source and the output of the tests: {folder}")


if __name__ == "__main__":
    main()
