#!/bin/sh
# What `make demo` runs: a job from its file to a model folder, with a daemon of its own that ends with it.
set -eu
cd "$(dirname "$0")/.."
export OFFMATE_HOME="$PWD/.demo/state"
# Else cuBLAS keeps 8 MiB of a card for each thread, 32 on an H100: a third of so small a budget, or nearly all of it.
export CUBLAS_WORKSPACE_CONFIG="${CUBLAS_WORKSPACE_CONFIG:-:16:8}"

jobs() { # the jobs as Python sees them
    offmate status --json | python -c "import json, sys; jobs = json.load(sys.stdin); print($1)"
}

python examples/pydoc.py
trap 'offmate down' EXIT
trap 'exit 130' INT TERM
offmate up
for job in $(jobs '*(job["id"] for job in jobs if job["state"] in ("submitted", "planning", "waiting", "running"))'); do
    offmate cancel "$job" # of a demo that was interrupted
done
offmate run examples/pydoc.yaml

echo
offmate show "$(jobs 'jobs[-1]["id"]')"
model=$(jobs 'jobs[-1]["output"]')
offmate down
trap - EXIT

echo
echo "The model folder is $model"
echo "The job is in a state folder of its own: OFFMATE_HOME=$OFFMATE_HOME offmate up, then offmate show 1"
echo "It writes on from 'The statement':"
echo
python examples/sample.py "$model"
