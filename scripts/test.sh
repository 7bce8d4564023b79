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
# the machine to itself.
options() {
  case "$1" in
  unit | parity | e2e | deploy) echo "-n $(($(nproc) < 4 ? $(nproc) : 4)) --dist loadfile" ;;
  esac
}
# threads PART: of each PyTorch.
threads() {
  case "$1" in
  unit | parity | e2e | deploy) echo 1 ;;
  *) nproc ;;
  esac
}

mark=${PYTEST_MARK:-not long}
# Seconds of one test, after which it is taken to hang.
timeout=$([ "$mark" = long ] && echo 3600 || echo 300)
failed=0
summary=()
for part in "$@"; do
  [ -n "$(find "tests/$part" -name 'test_*.py' -print -quit 2>/dev/null)" ] || continue
  echo "== tests/$part"
  started=$SECONDS
  # shellcheck disable=SC2046 # options are words
  OMP_NUM_THREADS=$(threads "$part") .venv/bin/python -m pytest -q --durations=10 -m "$mark" --timeout "$timeout" $(options "$part") "tests/$part"
  code=$?
  result=$(outcome "$code")
  [ "$result" != FAILED ] || failed=1
  summary+=("$(printf '%-8s %s in %d s' "$part" "$result" $((SECONDS - started)))")
done
echo "== summary"
printf '%s\n' "${summary[@]:-no test was run}"
[ "${#summary[@]}" -gt 0 ] && [ "$failed" -eq 0 ]
