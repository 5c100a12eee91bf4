#!/usr/bin/env bash
# From nothing to a served translation model in one command, in under ten minutes on two cores:
#
#   bash examples/train_tiny/run.sh            # makes everything in train_tiny/, then serves on port 8001
#   bash examples/train_tiny/run.sh FOLDER     # the same in another folder
#   SERVE=no bash examples/train_tiny/run.sh   # stops before serving
#
# Stopped half-way, the same command goes on with the training from its newest checkpoint.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
work=${1:-train_tiny}
port=${PORT:-8001}

if [ -x "$root/.venv/bin/dragoman" ]; then
    PATH="$root/.venv/bin:$PATH"
fi
if ! command -v dragoman > /dev/null || ! python -c 'import torch, onnx, sacrebleu' 2> /dev/null; then
    echo "this needs the training libraries: run 'make tools' once in $root, which installs them" >&2
    exit 1
fi

python "$here/make_text.py" "$work/text"
[ -f "$work/train.toml" ] || cp "$here/train.toml" "$work/train.toml"  # yours to change
echo "training (PyTorch takes some seconds to load)"
dragoman train "$work/train.toml"
weights=$(cat "$work/run/model"/*.safetensors | sha256sum)
if [ ! -f "$work/bundle/manifest.json" ] || [ "$(cat "$work/bundle.of" 2> /dev/null)" != "$weights" ]; then
    rm -rf "$work/bundle" "$work/bundle.of"  # of another model
    head -n 300 "$work/text/train.tsv" | cut -f1 > "$work/text/calibration.en"
    head -n 50 "$work/text/dev.en" > "$work/text/verification.en"
    dragoman export trained "$work/run/model" --out "$work/bundle" --id tiny-en-pt --licence CC0-1.0 \
        --calibrate-with "$work/text/calibration.en" --verify-with "$work/text/verification.en"
    echo "$weights" > "$work/bundle.of"
fi
dragoman evaluate "$work/bundle" --testset "dev=$work/text/dev.en,$work/text/dev.pt"
dragoman translate --bundle "$work/bundle" "The three old houses did not see the red door." "Did a girl draw the two birds?"
if [ "${SERVE:-yes}" = yes ]; then
    echo "serving; try: curl -s localhost:$port/translate -d q='The white cat found a letter.' -d source=en -d target=pt"
    exec dragoman serve --bundles "$work/bundle" --port "$port"
fi
