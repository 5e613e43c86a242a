#!/bin/sh
# What `make demo` runs: a job from its file to a model folder, with a daemon of its own that ends with it, and its first
# steps once more in plain PyTorch.
set -eu
cd "$(dirname "$0")/.."
export OFFMATE_HOME="$PWD/.demo/state"
# Else cuBLAS keeps 8 MiB of a card for each thread, 32 on an H100: a third of so small a budget, or nearly all of it.
export CUBLAS_WORKSPACE_CONFIG="${CUBLAS_WORKSPACE_CONFIG:-:16:8}"
# As offmate's processes have it: plain PyTorch is to compute with the same settings.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"

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
job=$(jobs 'jobs[-1]["id"]')
offmate show "$job"
model=$(jobs 'jobs[-1]["output"]')
run=$(jobs 'jobs[-1]["run_dir"]')
offmate down
trap - EXIT

echo
echo "The same first steps in plain PyTorch (examples/plain_pytorch.py), beside offmate's:"
echo
python examples/plain_pytorch.py "$run"

echo
echo "The trained model writes on from 'The statement':"
echo
python examples/sample.py "$model"

cat <<END

What to type next, in this shell:

    source $PWD/.venv/bin/activate
    export OFFMATE_HOME=$OFFMATE_HOME   # the demo's jobs; without this line yours, in ~/.local/state/offmate
    offmate up
    offmate status                      # offmate show $job and offmate logs $job tell more; offmate page, in a browser
    python examples/sample.py $model "The class"
    offmate plan examples/pydoc.yaml --gpu-budget 40MiB   # with less memory
    offmate certify examples/pydoc.yaml                   # every loss, weight and moment against plain PyTorch's
    offmate down

A job of your own is a file of a few lines; offmate keys lists its keys. What the demo made is in $PWD/.demo; a kernel
that it built for this processor is in ${XDG_CACHE_HOME:-$HOME/.cache}/offmate, and serves your jobs, too.
END
