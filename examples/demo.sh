#!/bin/sh
# What `make demo` runs: a job from its file to a model folder, with a daemon of its own that ends with it.
set -eu
cd "$(dirname "$0")/.."
export OFFMATE_HOME="$PWD/.demo/state"

python examples/pydoc.py
offmate up
trap 'offmate down' EXIT
offmate run examples/pydoc.yaml

job=$(offmate status --json | python -c 'import json, sys; print(json.load(sys.stdin)[-1]["id"])')
offmate show "$job"
model=$(offmate show "$job" --json | python -c 'import json, sys; print(json.load(sys.stdin)["output"])')
echo
echo "The model folder is $model"
echo "It writes on from 'The statement':"
echo
python examples/sample.py "$model"
echo
