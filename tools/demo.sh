#!/usr/bin/env bash
# `make demo`: a small GPT on real text, tensor and pipeline parallel over two nodes; see README. Run from the
# project's folder, after `make venv`.
set -Eeuo pipefail

readonly run_id_file=.cache/demo-run-id
readonly image=${IMAGE:-tridock:cpu}
readonly with_v115=configs/demo-3d-v1.1.5.yaml with_core=configs/demo-3d.yaml

step() { printf '\n== %s\n' "$*"; }

engine_answers() { docker version --format '{{.Server.Version}}' >/dev/null 2>&1; }

image_has_megatron() {
  docker run --rm --entrypoint test "$image" -f /opt/megatron-v1.1.5/pretrain_gpt2.py
}

# choose_experiment WHERE CHECK...: Megatron-LM v1.1.5 where CHECK finds it, else megatron-core; says which.
choose_experiment() {
  local where=$1
  shift
  if "$@"; then
    config=$with_v115
    echo "engine: Megatron-LM v1.1.5, which $where has"
  else
    config=$with_core
    echo "engine: megatron-core, because $where is without Megatron-LM v1.1.5 (docs/megatron.md says how to bring it)"
  fi
}

run_on_twin() {
  step "image: $image"
  "$(dirname "$0")/compose.sh"
  make --no-print-directory image FLAVOR=cpu
  choose_experiment "the image" image_has_megatron
  step "data: this machine's Python standard library"
  tridock data demo
  step "run: $config on the two nodes of hostfiles/twin"
  fab launch --hosts hostfiles/twin --config "$config" --run-id-file "$run_id_file"
}

run_here() {
  echo "No Docker engine answers here: the same experiment runs as local ranks in .venv, without ssh."
  step "packages: torch, DeepSpeed and megatron-core into .venv"
  make --no-print-directory venv
  choose_experiment "this machine" test -f "${TRIDOCK_MEGATRON:-/opt/megatron-v1.1.5}/pretrain_gpt2.py"
  step "data: this machine's Python standard library"
  tridock data demo
  step "run: $config on this machine's CPU"
  # Four ranks: the CPU, also on a machine with GPUs.
  DS_ACCELERATOR=cpu tridock train "$config" --nproc 4 --run-id-file "$run_id_file"
}

# With the torch that trained it. A small model after 60 steps has the look of the language, and little sense.
sample() {
  if engine_answers; then
    # Without what Compose says of the network that it makes.
    "$(dirname "$0")/compose.sh" run --rm -T trainer tridock generate "$@" 2>.cache/demo-sample.log || { cat .cache/demo-sample.log >&2; return 3; }
  else
    tridock generate "$@"
  fi
}

main() {
  local started=$SECONDS config
  export PATH="$PWD/.venv/bin:$PATH"
  mkdir -p .cache
  rm -f "$run_id_file"
  if engine_answers; then run_on_twin; else run_here; fi
  step "result"
  tridock report "runs/$(<"$run_id_file")"
  step "sample: what the model writes after \"def \""
  sample "runs/$(<"$run_id_file")" --prompt 'def ' --max-new-tokens 60 --temperature 0.7
  echo
  echo "all of it   tridock report runs/$(<"$run_id_file") -o report.html"
  echo "finished in $((SECONDS - started)) s"
  if engine_answers; then echo "The twin is still up: fab status --hosts hostfiles/twin; fab down --hosts hostfiles/twin"; fi
}

main "$@"
