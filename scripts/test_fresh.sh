#!/usr/bin/env bash
# test_fresh.sh [SEED]: tries fresh examples (tests/fresh.py) for some four minutes. Without a seed that of the commit: a
# commit gets the same examples, and so the same result, each time, and each commit others.
set -euo pipefail
cd "$(dirname "$0")/.."
cores=$(($(nproc) < 4 ? $(nproc) : 4))
seed=${1:-}
if [ -z "$seed" ]; then
  commit=$(git rev-parse HEAD 2>/dev/null) || commit=$(date +%s%N | md5sum)
  seed=$((16#${commit:0:8}))
fi
echo "== fresh examples of seed $seed; again: make test-fresh SEED=$seed"
# fresh CASES SECONDS FOLDER...: those of the tests below some folders. Only files that have some: collecting all would
# take a good part of the time.
fresh() {
  local cases=$1 seconds=$2 files
  shift 2
  mapfile -t files < <(grep -lrE 'hypothesis|mark\.(fresh|sampled)|SAMPLED|covering\(' --include='test_*.py' "$@" | sort)
  OMP_NUM_THREADS=1 timeout --foreground -s INT -k 60 1800 .venv/bin/python -m pytest -q --durations=5 --timeout 900 \
    -n "$cores" --dist worksteal --max-worker-restart 0 --fresh "$seed" --fresh-cases "$cases" \
    --fresh-seconds "$seconds" --hypothesis-seed "$seed" "${files[@]}" </dev/null
}
# As in scripts/test.sh.
export PYTHONDONTWRITEBYTECODE=
code=0
fresh 40 180 tests/unit tests/sim tests/parity || code=1
# Triton's interpreter is chosen before the process loads Triton, as by the part "kernels" of `make test`.
fresh 6 60 tests/kernels || code=1
[ "$code" -eq 0 ] || { echo "== failed with seed $seed; again: make test-fresh SEED=$seed" && exit 1; }
