#!/usr/bin/env bash
# Does what a newcomer does: clones HEAD into a new folder, and there runs `make run ARGS=--once` and `make test`,
# which make a new virtual environment. Prints how long each took. The folder is removed unless something failed.
set -euo pipefail
cd "$(dirname "$0")/.."

fresh=$(mktemp -d "${TMPDIR:-/tmp}/fissile-fresh.XXXXXX")
echo "== a fresh clone of $(git rev-parse --short HEAD) in $fresh"
git clone --quiet . "$fresh/fissile"
cd "$fresh/fissile"

took=()
timed() {
  local started=$SECONDS
  echo "== $*"
  "$@" </dev/null || { echo "error: '$*' failed; the clone is kept in $fresh" >&2; exit 1; }
  took+=("$(printf '%4d s  %s' $((SECONDS - started)) "$*")")
}

# Any free port: another service may be running on this machine.
timed env FISSILE_PORT=0 make run ARGS=--once
timed env FISSILE_PORT=0 make run ARGS=--once
timed make test
echo "== fresh clone: all passed"
printf '%s\n' "${took[@]}"
rm -rf "$fresh"
