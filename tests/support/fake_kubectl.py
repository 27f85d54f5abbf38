"""A kubectl for one capture: answers from a folder, and breaks where it is told to.

The folder `FAKE_CLUSTER` holds `objects.json` (``{"KIND/NAME": body}``) and the volume's files below `volume/`. It gets
`calls.jsonl`, and `created.jsonl` with the bodies that were to be created. A list of bodies is what one `get` after the
other sees; null is an API server that is away. `cut_bytes` in objects.json ends each stream after so many bytes, as
connections do; `away_after` lets no stream bring what is beyond that place of a file. `FAKE_REFUSES` is a verb that
finds no API server. `FAKE_SAYS` is what every call complains of instead of doing anything. `log` in objects.json is
what containers print.
"""

import json
import os
import sys
from pathlib import Path

CLUSTER = Path(os.environ["FAKE_CLUSTER"])


def main(arguments: list[str]) -> int:
    with (CLUSTER / "calls.jsonl").open("a") as calls:
        calls.write(json.dumps(arguments) + "\n")
    words = [word for word in arguments if not word.startswith("--")]
    if os.environ.get("FAKE_REFUSES") == words[0] or "FAKE_SAYS" in os.environ:
        return refused()
    state = json.loads((CLUSTER / "objects.json").read_text())
    match words[0]:
        case "get":
            return get(state["objects"], words[1:])
        case "exec":
            return execute(state, arguments[arguments.index("--") + 1 :])
        case "wait":
            if "unready" in state:
                sys.stderr.write("error: timed out waiting for the condition\n")
            return 1 if "unready" in state else 0
        case "apply":
            given = sys.stdin.read()
            with (CLUSTER / "applied.jsonl").open("a") as applied:
                applied.write(given + "\n")
            sys.stdout.write(json.dumps(in_namespace(json.loads(given))))
            return 0
        case _:
            if words[0] == "create":
                with (CLUSTER / "created.jsonl").open("a") as created:
                    created.write(json.dumps(json.loads(sys.stdin.read())) + "\n")
            sys.stdout.write(state.get("log", "") if words[0] == "logs" else "")
            return 0


def in_namespace(body: dict) -> dict:
    """What the API server makes of an object, or of a list of them."""
    if "items" in body:
        return {**body, "items": list(map(in_namespace, body["items"]))}
    return {**body, "metadata": {"namespace": "team", **body["metadata"]}}


def get(objects: dict[str, dict], words: list[str]) -> int:
    kind, _, name = words[0].partition("/")
    kind, name = kind.partition(".")[0].rstrip("s"), name or "".join(words[1:2])
    found = {key: body for key, body in objects.items() if key.startswith(f"{kind}/")}
    if name:
        body = next((body for key, body in found.items() if key in {f"{kind}/{name}", f"{kind}/*"}), None)
        if isinstance(body, list):
            body = body[min(gets_before(words), len(body) - 1)]
            if body is None:
                return refused()
        sys.stdout.write(json.dumps(body) if body else "")
    else:
        sys.stdout.write(json.dumps({"items": list(found.values())}))
    return 0


def gets_before(words: list[str]) -> int:
    """How often the same was asked for before."""
    lines = map(json.loads, (CLUSTER / "calls.jsonl").read_text().splitlines())
    return sum([word for word in line if not word.startswith("--")] == ["get", *words] for line in lines) - 1


def refused() -> int:
    refusal = "The connection to the server 127.0.0.1:6443 was refused - did you specify the right host?\n"
    sys.stderr.write(os.environ.get("FAKE_SAYS", refusal))
    return 1


def execute(state: dict, command: list[str]) -> int:
    path = CLUSTER / "volume" / command[-1].removeprefix("/capture/")
    if not path.exists():
        sys.stderr.write(f"cat: {command[-1]}: No such file or directory\ncommand terminated with exit code 1\n")
        return 1
    if command[0] == "ls":
        sys.stdout.write("".join(f"{each.name}\n" for each in path.iterdir()))
        return 0
    content = path.read_bytes()
    if command[0] == "tail":
        content = content[: state.get("away_after")][int(command[2]) - 1 :][: state.get("cut_bytes")]
    sys.stdout.buffer.write(content)
    return 0


sys.exit(main(sys.argv[1:]))
