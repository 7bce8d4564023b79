#!/usr/bin/env bash
# Runs the named parts of tests/ in two lanes side by side: parts that compute, one after the other, at a lower priority,
# and beside them parts that mostly wait (for processes that start, for leases, for silences); the lane that has ended
# first takes the kernels, then parity. So the cores are busy all the time, and what measures times comes first. Parts of
# one kind are one run of pytest, which imports and collects once. A run's output is shown when it has ended, with its own
# summary; goes on after one that fails.
# PYTEST_MARK chooses tests by marker (default: all but the slow and the long ones).
set -uo pipefail
cd "$(dirname "$0")/.." || exit

cores=$(($(nproc) < 4 ? $(nproc) : 4))
logs=$(mktemp -d)
lanes=()
# Ends the lanes' groups of processes, whichever is left, with SIGINT: pytest then takes down what its tests have started.
end_lanes() {
  trap - INT TERM
  kill -INT "${lanes[@]/#/-}" 2>/dev/null
  wait
  exit 130
}
trap 'rm -rf "$logs"' EXIT
trap end_lanes INT TERM

# outcome EXIT_CODE: in words. 5 is pytest's "no tests collected": the marker left none of these parts.
outcome() {
  case "$1" in
  0) echo passed ;;
  5) echo "has no such test" ;;
  *) echo FAILED ;;
  esac
}

# lane RUN: the one that it belongs to, or either.
lane() {
  case "$1" in
  services) echo waiting ;;
  kernels | parity) echo either ;;
  *) echo computing ;;
  esac
}

# run_of PART: the run of pytest that it belongs to. Engines of parity keep what their models have set in a process, and
# kernels are interpreted in all of theirs.
run_of() {
  case "$1" in
  e2e | deploy | chaos) echo services ;;
  unit | sim) echo units ;;
  *) echo "$1" ;;
  esac
}

# options RUN: spread over processes with one thread each; of what waits, over more than there are cores. Files stay
# whole where their tests share a service, else a few of them would take most of the time. A process that dies ends the
# run: pytest-xdist 3.8 may wait for ever for one that takes its place. `make chaos` measures: alone, one test at a time.
options() {
  case "$1" in
  services) [ "${CHAOS_SCALE:-}" = full ] && return ;;&
  services) echo "-n $((cores + 2)) --dist loadfile --no-loadscope-reorder --max-worker-restart 0" ;;
  parity) echo "-n $cores --dist loadfile --no-loadscope-reorder --max-worker-restart 0" ;;
  *) echo "-n $cores --dist worksteal --max-worker-restart 0" ;;
  esac
}

# run_parts RUN PART...: leaves its output and its line of the summary in $logs.
run_parts() {
  local run=$1 started=$SECONDS code result lower=()
  shift
  [ "$(lane "$run")" = waiting ] || lower=(nice -n 5)
  # shellcheck disable=SC2046,SC2086 # options are words
  OMP_NUM_THREADS=1 "${lower[@]}" timeout --foreground -s INT -k 60 "$run_timeout" \
    .venv/bin/python -m pytest -q --durations=20 -m "$mark" $limits $(options "$run") "${@/#/tests/}" \
    </dev/null >"$logs/$run.log" 2>&1
  code=$?
  result=$(outcome "$code")
  [ "$result" != FAILED ] || touch "$logs/failed"
  printf '%-18s %s in %d s\n' "$*" "$result" $((SECONDS - started)) >"$logs/$run.summary"
  # In one piece: the other lane may end a run at the same time.
  (flock 9 && echo "== tests: $*" && cat "$logs/$run.log") 9>"$logs/lock"
}

# run_lane LANE PART...: the runs that belong to it, each with those of the parts that are its own, in their order; then
# those of either lane that the other one has not begun (a folder says that a run has been taken).
run_lane() {
  local name=$1 which part run own
  shift
  for which in "$name" either; do
    for run in $(for part in "$@"; do run_of "$part"; done | awk '!seen[$0]++'); do
      own=()
      for part in "$@"; do
        if [ "$(run_of "$part")" = "$run" ] && [ -n "$(find "tests/$part" -name 'test_*.py' -print -quit 2>/dev/null)" ]; then
          own+=("$part")
        fi
      done
      if [ "$(lane "$run")" = "$which" ] && [ ${#own[@]} -gt 0 ] && mkdir "$logs/$run" 2>/dev/null; then
        run_parts "$run" "${own[@]}"
      fi
    done
  done
}

mark=${PYTEST_MARK:-not long and not slow}
# Seconds after which a test is taken to hang, and a run. A test that does not even heed the signal shows its threads
# and ends the process, after as much time as the longest limit that a test has of its own.
case "$mark" in
long*) timeout=3600 run_timeout=14400 ;;
*) timeout=300 run_timeout=2000 ;;
esac
longest=$((timeout + 700))
# With CHAOS_SCALE=full one chaos test audits a million tokens, which takes 10 minutes on two idle cores.
[ "${CHAOS_SCALE:-}" = full ] && longest=3600 run_timeout=7200
limits="--timeout $timeout -o faulthandler_timeout=$longest"
echo "== running: $* (output is shown when its run has ended)"
# With job control: a shell without it would have what runs beside it ignore SIGINT, and with it the services that tests
# interrupt.
set -m
# Hundreds of processes start: each would compile every module anew.
export PYTHONDONTWRITEBYTECODE=
for name in waiting computing; do
  run_lane "$name" "$@" &
  lanes+=($!)
done
wait
echo "== summary"
found=0
for summary in "$logs"/*.summary; do
  [ ! -f "$summary" ] || { cat "$summary" && found=1; }
done
[ "$found" -eq 1 ] || echo "no test was run"
[ "$found" -eq 1 ] && [ ! -f "$logs/failed" ]
