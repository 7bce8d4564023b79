#!/usr/bin/env bash
# Runs the named parts of tests/ one after the other, each with its own summary; goes on after a part that fails.
# PYTEST_MARK chooses tests by marker (default: all but the long ones).
set -uo pipefail
cd "$(dirname "$0")/.." || exit

# outcome EXIT_CODE: in words. 5 is pytest's "no tests collected": the marker left none of this part.
outcome() {
  case "$1" in
  0) echo passed ;;
  5) echo "has no such test" ;;
  *) echo FAILED ;;
  esac
}

# options PART: spread over the cores, a file to each in turn, with one thread each; what measures times under faults has
# the machine to itself. A process that dies ends the part: pytest-xdist 3.8 may wait for ever for one that takes its place.
options() {
  case "$1" in
  unit | parity | e2e | deploy)
    echo "-n $(($(nproc) < 4 ? $(nproc) : 4)) --dist loadfile --max-worker-restart 0"
    ;;
  # A few of its files take most of its time.
  kernels) echo "-n $(($(nproc) < 4 ? $(nproc) : 4)) --dist worksteal --max-worker-restart 0" ;;
  esac
}
# threads PART: of each PyTorch.
threads() {
  case "$1" in
  unit | kernels | parity | e2e | deploy) echo 1 ;;
  *) nproc ;;
  esac
}

mark=${PYTEST_MARK:-not long}
# Seconds after which a test is taken to hang, and a part. A test that does not even heed the signal shows its threads
# and ends the process, after as much time as the longest limit that a test has of its own.
case "$mark" in
long*) timeout=3600 part_timeout=14400 ;;
*) timeout=300 part_timeout=2000 ;;
esac
limits="--timeout $timeout -o faulthandler_timeout=$((timeout + 700))"
failed=0
summary=()
for part in "$@"; do
  [ -n "$(find "tests/$part" -name 'test_*.py' -print -quit 2>/dev/null)" ] || continue
  echo "== tests/$part"
  started=$SECONDS
  # shellcheck disable=SC2046,SC2086 # options are words
  OMP_NUM_THREADS=$(threads "$part") timeout --foreground -s INT -k 60 "$part_timeout" \
    .venv/bin/python -m pytest -q --durations=10 -m "$mark" $limits $(options "$part") "tests/$part"
  code=$?
  result=$(outcome "$code")
  [ "$result" != FAILED ] || failed=1
  summary+=("$(printf '%-8s %s in %d s' "$part" "$result" $((SECONDS - started)))")
done
echo "== summary"
printf '%s\n' "${summary[@]:-no test was run}"
[ "${#summary[@]}" -gt 0 ] && [ "$failed" -eq 0 ]
