#!/usr/bin/env bash
# Installs dist/fissile-*.whl into a new environment and serves the demo model from it, where neither a compiler nor the
# checkout can be reached. PYTHON= names the interpreter; the pinned CPU build of PyTorch has been tried with 3.11.
set -euo pipefail
cd "$(dirname "$0")/.."
wheels=(dist/fissile-*-manylinux_*_x86_64.whl)
[ -f "${wheels[0]}" ] || { echo "error: no manylinux wheel in dist: run make wheel" >&2; exit 1; }
wheel=$PWD/${wheels[0]}
model=$PWD/deploy/demo/checkpoint
constraints=$PWD/requirements/tests.lock
torch=$(sed -nE 's/^cpu = \["(torch==[^"]+\+cpu)"\].*/\1/p' pyproject.toml)
folder=$(mktemp -d "${TMPDIR:-/tmp}/fissile-wheel.XXXXXX")
trap 'rm -rf "$folder"' EXIT

echo "== $(basename "$wheel"), $(du -k "$wheel" | cut -f1) KiB"
"${PYTHON:-python3}" -m venv "$folder/venv"
install=("$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check -c "$constraints")
"${install[@]}" "$torch" 2>/dev/null || "${install[@]}" --index-url https://download.pytorch.org/whl/cpu "$torch"
"${install[@]}" "${wheel}[router,worker,cpu]"

# Nothing but the environment's own programs: no compiler, no tool of the system.
alone() { (cd "$folder" && env -i PATH="$folder/venv/bin" HOME="$folder" LANG=C.UTF-8 "$@"); }
alone "$folder/venv/bin/python" - <<'PYTHON'
import shutil

from kernels.cpu import build, instruction_sets, library

assert not any(map(shutil.which, build.COMPILERS)), "a compiler is on the PATH"
loaded = library.load()
abilities = library.abilities(loaded)
missing = set(instruction_sets.CHOICES) - {instruction_sets.AUTO} - set(abilities)
assert not missing, f"the library lacks {missing}"
print("== instruction sets:", ", ".join(abilities), "- here:", instruction_sets.take(loaded))
PYTHON
alone fissile serve --model "$model" --port 0 --ask --once
echo "== the wheel installs and serves"
