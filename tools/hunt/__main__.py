"""`./just hunt` and `./just soak`: looks for faults of the operator by machine."""

import argparse
import contextlib
import dataclasses
import functools
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import yaml

from devcluster.cluster.cluster import Cluster
from devcluster.host.arguments import count, output_file, positive, whole
from devcluster.host.errors import ClusterError
from hunt import findings
from hunt.findings import Beat
from hunt.hunting import Hunt
from hunt.oracles import ORACLES, judge
from hunt.records import Record
from hunt.rounds import Round
from hunt.seeded import SeededFault, seeded_faults
from hunt.soak import Soak
from hunt.stage import Stage, stage
from hunt.steps import SHORT_TOUR_FAULTS, short_tour

_SHARE_FOUND: Final = 0.9


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 where nothing was found, 1 where something was, 2 where it could not be looked for."""
    options = _options(arguments)
    if stale := [fault.name for fault in seeded_faults() if fault.is_stale()]:
        print(f"hunt: the operator's code has moved on, mend tools/hunt/seeded_faults.toml: {'; '.join(stale)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # operator and cluster go with it
    folder = Path(tempfile.mkdtemp(prefix="specdecode-hunt-"))
    try:
        with stage(options.name, folder) as place:
            result: int = options.run(place, options)
    except ClusterError as error:
        with contextlib.suppress(OSError):  # of an operator that ran there are logs
            folder.rmdir()
        print(f"hunt: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"hunt: interrupted; the operator's logs: {folder}", file=sys.stderr)
        return 130
    if result:
        print(f"the operator's logs: {folder}")
    else:
        shutil.rmtree(folder)
    return result


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return what is asked for; what is wrong with it is told with the usage of the command that is meant."""
    options, unknown = _parser().parse_known_args(arguments)
    if unknown:
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}: use those of the usage above")
    if options.command == "hunt" and options.fault and not options.seeded:
        options.parser.error(f"argument --fault: {options.fault[0]}: needs --seeded, add it")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="./just", description=__doc__)
    common = argparse.ArgumentParser(add_help=False)
    name = "of the cluster; one that is up is used, and stays up (default: %(default)s)"
    common.add_argument("--name", type=_name, default="hunt", help=name)
    seed = "the same seed gives the same steps (default: %(default)s)"
    common.add_argument("--seed", type=whole, default=1, help=seed)
    minutes = "it ends with the round that is under way then (default: %(default)s)"
    common.add_argument("--minutes", type=positive, default=10, help=minutes)
    commands = parser.add_subparsers(required=True, dest="command")
    hunt = commands.add_parser("hunt", parents=[common], help="look for faults, and shrink what is found")
    what = hunt.add_mutually_exclusive_group()
    what.add_argument("--repeat", type=_finding, metavar="FILE", help="repeat a finding")
    what.add_argument("--seeded", action="store_true", help="look for faults that are made on purpose, one by one")
    written = "a finding is written to it (default: %(default)s)"
    hunt.add_argument("--finding", type=output_file, metavar="FILE", default="hunt-finding.yaml", help=written)
    one = "with --seeded: this one, from 0 on (default: all)"
    hunt.add_argument("--fault", action="append", type=_fault, metavar="NUMBER", help=one)
    hunt.add_argument("--without", action="append", default=[], choices=ORACLES, help="leave an oracle out")
    hunt.set_defaults(run=_hunt, parser=hunt)
    soak = commands.add_parser("soak", parents=[common], help="churn, with faults on and off in turn")
    soak.add_argument("--objects", type=count, default=12, help="how many there are at a time (default: %(default)s)")
    soak.set_defaults(run=_soak, parser=soak)
    return parser


def _name(text: str) -> str:
    try:
        return Cluster(text).name
    except ClusterError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _finding(text: str) -> list[Beat]:
    try:
        return findings.read(Path(text))
    except OSError as error:
        message = f"{text!r}: {error.strerror}: name a file that ./just hunt wrote (--finding)"
        raise argparse.ArgumentTypeError(message) from error
    except (yaml.YAMLError, ValueError, LookupError, TypeError) as error:
        message = f"{text!r}: holds no finding: name a file that ./just hunt wrote (--finding)"
        raise argparse.ArgumentTypeError(message) from error


def _fault(text: str) -> int:
    last = len(seeded_faults()) - 1
    if not text.isdecimal() or int(text) > last:
        raise argparse.ArgumentTypeError(f"{text!r}: use the number of a seeded fault, from 0 to {last}")
    return int(text)


def _hunt(place: Stage, options: argparse.Namespace) -> int:
    without = frozenset(options.without)
    if options.seeded:
        return _seeded(place, options.fault, without)
    hunt = Hunt(place, options.seed, options.finding, without)
    if options.repeat:
        found = hunt.repeat(options.repeat)
        print(*found, sep="\n")
    else:
        found = hunt.run(options.minutes)
    print(hunt.tried)
    print(f"{len(found)} findings" if found else "nothing was found")
    return int(bool(found))


def _seeded(place: Stage, numbers: Sequence[int] | None, without: frozenset[str]) -> int:
    """Look for each seeded fault; fail where fewer than nine of ten are found, or something that nobody made."""
    faults = seeded_faults()
    chosen = [faults[number] for number in numbers] if numbers else faults
    if noise := _look_for(place, None, without):
        print(f"without any fault: {noise}")
        return 1
    found = 0
    for fault in chosen:
        by = _look_for(place, fault, without)
        found += bool(by)
        print(f"{'found' if by else 'MISSED':6} {fault.name}: {by or 'by no oracle'}", flush=True)
    print(f"{found} of {len(chosen)} found")
    return int(found < _SHARE_FOUND * len(chosen))


def _look_for(place: Stage, fault: SeededFault | None, without: frozenset[str]) -> str:
    """Return by which oracles a fault was found, and what is found without these; empty where it was not."""
    name = f"{int(time.time()) % 100_000:05d}"

    def run(on: Stage) -> Record:
        until = functools.partial(judge, without=without)
        return Round(on, name, short_tour(), SHORT_TOUR_FAULTS, until=until).run()

    if fault is None:
        record = run(place)
    else:
        with fault.made(place.folder / f"copy-{name}") as environment:
            record = run(dataclasses.replace(place, environment=environment))
    by = {finding.oracle for finding in judge(record, without)}
    left = judge(record, without | by)
    return ", ".join(sorted(by)) + (f"; without these still {len(left)}" if left else "")


def _soak(place: Stage, options: argparse.Namespace) -> int:
    soaked = Soak(place, f"{int(time.time()) % 100_000:05d}", options.seed, options.objects).soak(options.minutes)
    print(soaked)
    for finding in soaked.findings:
        print(finding)
    print("all invariants hold" if not soaked.findings else f"{len(soaked.findings)} findings")
    return int(bool(soaked.findings))


if __name__ == "__main__":
    sys.exit(main())
