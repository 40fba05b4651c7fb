#!/usr/bin/env bash
# For a machine with a GPU, about 6 minutes: the step, DDP and FSDP2 through the real launcher, extraction, the engine.
# Leaves a log and metrics in ${OUT:-.}. Needs redraft with its dev extras and a CUDA build of torch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out="$(realpath "${OUT:-.}")"
exec > >(tee "$out/gpu.log") 2>&1
python tests/gpu_step.py
gpus="$(python -c 'import torch; print(torch.cuda.device_count())')"
echo "== the whole pipeline on profile tiny: extraction, training, engine"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
git clone --quiet . "$work/redraft"
cd "$work/redraft"
sed -i 's/^profile: smollm /profile: tiny /' params.yaml
dvc repro
cp metrics/train.json "$out/train-one.json"
for launcher in accelerate/ddp.yaml accelerate/fsdp2.yaml; do
  echo "== $launcher, $gpus process(es)"
  sed -i "s|^  processes: .*|  processes: $gpus|; s|^  launcher: .*|  launcher: $launcher|; s|^  precision: .*|  precision: bf16|" \
    profiles/tiny.yaml
  launch=(python stages/train.py)
  if [ "$gpus" = 1 ]; then  # the stage starts no launcher for one process
    launch=(accelerate launch --config_file "$launcher" --num_processes 1 stages/train.py)
  fi
  timeout 120 "${launch[@]}"
  cp metrics/train.json "$out/train-$(basename "$launcher" .yaml).json"
  python tests/gpu_step.py "$out/train-one.json" metrics/train.json
done
echo "GPU checks passed"
