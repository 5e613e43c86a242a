#!/bin/sh
# Tries the container image where Docker is: builds it, asks `offmate doctor`, starts the daemon, trains a tiny model on
# the CPU, and removes what it made but the image. No GPU is needed.
#   sh deploy/try_image.sh
set -eu
cd "$(dirname "$0")/.."

if ! said=$(docker info 2>&1 >/dev/null); then
    echo "No Docker engine answers here, so the image cannot be tried." >&2
    echo "  $said" >&2
    echo "  hint: start Docker (sudo systemctl start docker), or run this on a machine that has it" >&2
    exit 69
fi

name=offmate-try-$$
data=$(mktemp -d)
clean() {
    docker rm --force "$name" >/dev/null 2>&1 || true
    # What the container's user wrote, only that user may remove.
    docker run --rm --volume "$data:/data" --entrypoint rm offmate -rf /data/pydoc >/dev/null 2>&1 || true
    rm -rf "$data"
}
trap clean EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

echo "1. docker build"
docker build --file deploy/Dockerfile --tag offmate .

echo "2. offmate doctor"
docker run --rm --entrypoint offmate offmate doctor || echo "doctor found something: see above"

echo "3. offmate up"
chmod 777 "$data" # the container's user is another one
cat >"$data/job.yaml" <<END
model: /data/pydoc/model
dataset: /data/pydoc/text.jsonl
max_length: 64
max_steps: 3
END
docker run --detach --init --name "$name" --volume "$data:/data" --volume "$PWD/examples:/examples:ro" offmate
tries=0
until docker exec "$name" offmate status; do
    tries=$((tries + 1))
    if [ "$tries" -eq 60 ]; then
        docker logs "$name" >&2
        echo "The daemon did not answer within a minute." >&2
        exit 1
    fi
    sleep 1
done

echo "4. A tiny job on the CPU"
docker exec "$name" python -c "
from pathlib import Path
from runpy import run_path
run_path('/examples/pydoc.py')['prepare'](Path('/data/pydoc'))"
docker exec "$name" offmate run /data/job.yaml

echo "5. offmate down"
docker exec "$name" offmate down || true # the container may end before the command does
code=$(docker wait "$name")
if [ "$code" -ne 0 ]; then
    docker logs --tail 20 "$name" >&2
    echo "The daemon ended with exit code $code." >&2
    exit 1
fi
echo "The image works: a job was trained and the daemon ended by itself."
