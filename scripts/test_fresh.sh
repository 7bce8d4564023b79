#!/usr/bin/env bash
# test_fresh.sh [SEED]: tries fresh examples (tests/fresh.py) for four minutes. Without a seed that of the commit: a commit
# gets the same examples, and so the same result, each time, and each commit others.
set -euo pipefail
cd "$(dirname "$0")/.."
cores=$(($(nproc) < 4 ? $(nproc) : 4))
seed=${1:-}
if [ -z "$seed" ]; then
  commit=$(git rev-parse HEAD 2>/dev/null) || commit=$(date +%s%N | md5sum)
  seed=$((16#${commit:0:8}))
fi
# Only files that have some: collecting all would take a good part of the time.
mapfile -t files < <(grep -lrE 'hypothesis|mark\.(fresh|sampled)|covering\(' --include='test_*.py' tests/unit tests/sim tests/parity | sort)
echo "== fresh examples of seed $seed; again: make test-fresh SEED=$seed"
OMP_NUM_THREADS=1 timeout --foreground -s INT -k 60 1800 .venv/bin/python -m pytest -q --durations=5 --timeout 900 \
  -n "$cores" --dist worksteal --max-worker-restart 0 --fresh "$seed" --hypothesis-seed "$seed" \
  "${files[@]}" </dev/null ||
  { echo "== failed with seed $seed; again: make test-fresh SEED=$seed" && exit 1; }
