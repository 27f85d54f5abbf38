"""A kubectl for one capture: answers from a folder, and breaks where it is told to.

The folder `FAKE_CLUSTER` holds `objects.json` (``{"KIND/NAME": body}``), the volume's files below `volume/`, and gets
`calls.jsonl`. `cut_bytes` in objects.json ends each stream after so many bytes, as connections do.
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
        case _:
            sys.stdin.read() if words[0] in {"create", "apply"} else None
            return 0


def get(objects: dict[str, dict], words: list[str]) -> int:
    kind = words[0].partition(".")[0].rstrip("s")
    kind, _, name = kind.partition("/") if "/" in kind else (kind, "", words[1] if len(words) > 1 else "")
    found = {key: body for key, body in objects.items() if key.startswith(f"{kind}/")}
    if name:
        body = next((body for key, body in found.items() if key in {f"{kind}/{name}", f"{kind}/*"}), None)
        sys.stdout.write(json.dumps(body) if body else "")
    else:
        sys.stdout.write(json.dumps({"items": list(found.values())}))
    return 0


def execute(state: dict, command: list[str]) -> int:
    path = CLUSTER / "volume" / command[-1].removeprefix("/capture/")
    if not path.exists():
        sys.stderr.write(f"cat: {command[-1]}: No such file or directory\ncommand terminated with exit code 1\n")
        return 1
    content = path.read_bytes()
    if command[0] == "tail":
        content = content[int(command[2]) - 1 :][: state.get("cut_bytes")]
    sys.stdout.buffer.write(content)
    return 0


sys.exit(main(sys.argv[1:]))
