#!/usr/bin/env bash
# `make demo`: a small GPT on real text over two nodes; see README. Run from the project's folder, after `make venv`.
set -Eeuo pipefail

readonly config=configs/demo.yaml
readonly run_id_file=.cache/demo-run-id

step() { printf '\n== %s\n' "$*"; }

engine_answers() { docker version --format '{{.Server.Version}}' >/dev/null 2>&1; }

run_on_twin() {
  step "image: tridock:cpu"
  make --no-print-directory image FLAVOR=cpu
  step "data: this machine's Python standard library"
  tridock data demo
  step "run: $config on the two nodes of hostfiles/twin"
  fab launch --hosts hostfiles/twin --config "$config" --run-id-file "$run_id_file"
}

run_here() {
  echo "No Docker engine answers here: the same experiment runs as local ranks in .venv, without ssh."
  step "packages: torch and DeepSpeed into .venv"
  make --no-print-directory venv
  step "data: this machine's Python standard library"
  tridock data demo
  step "run: $config on this machine"
  tridock train "$config" --nproc 2 --run-id-file "$run_id_file"
}

main() {
  local started=$SECONDS
  export PATH="$PWD/.venv/bin:$PATH"
  mkdir -p .cache
  rm -f "$run_id_file"
  if engine_answers; then run_on_twin; else run_here; fi
  step "result"
  tridock report "runs/$(<"$run_id_file")"
  echo "finished in $((SECONDS - started)) s"
  if engine_answers; then echo "The twin is still up: fab status --hosts hostfiles/twin; fab down --hosts hostfiles/twin"; fi
}

main "$@"
