#!/usr/bin/env bash
# Installs dist/*.whl into new environments, where neither a compiler nor the checkout can be reached: the client alone,
# and the service, which serves the demo model and is called by that client. PYTHON= names the interpreter; the pinned
# CPU build of PyTorch has been tried with 3.11.
set -euo pipefail
cd "$(dirname "$0")/.."
wheels=(dist/fissile-*-manylinux_*_x86_64.whl)
[ -f "${wheels[0]}" ] || { echo "error: no manylinux wheel in dist: run make wheel" >&2; exit 1; }
wheel=$PWD/${wheels[0]}
clients=(dist/fissile_client-*-py3-none-any.whl)
[ -f "${clients[0]}" ] || { echo "error: no wheel of the client in dist: run make wheel" >&2; exit 1; }
client=$PWD/${clients[0]}
model=$PWD/deploy/demo/checkpoint
constraints=$PWD/requirements/tests.lock
torch=$(sed -nE 's/^cpu = \["(torch==[^"]+\+cpu)"\].*/\1/p' pyproject.toml)
folder=$(mktemp -d "${TMPDIR:-/tmp}/fissile-wheel.XXXXXX")
serving=""
end() {
  [ -z "$serving" ] || { kill "$serving" && wait "$serving" || true; } 2>/dev/null
  rm -rf "$folder"
}
trap end EXIT

# (alone ENVIRONMENT COMMAND...): nothing but the environment's own programs, no compiler, no tool of the system.
alone() {
  local bin=$folder/$1/bin
  shift
  cd "$folder"
  exec env -i PATH="$bin" HOME="$folder" LANG=C.UTF-8 "$@"
}

# pip_install ENVIRONMENT ARGUMENT...
pip_install() {
  local python=$folder/$1/bin/python
  shift
  "$python" -m pip install --quiet --disable-pip-version-check -c "$constraints" "$@"
}

echo "== $(basename "$client"), $(du -k "$client" | cut -f1) KiB"
"${PYTHON:-python3}" -m venv "$folder/client"
pip_install client "$client"
(alone client python -) <<'PYTHON'
from importlib.metadata import distributions
from importlib.util import find_spec

import fissile.client

names = {one.metadata["Name"] for one in distributions()} - {"pip", "setuptools"}
expected = {"fissile-client", "grpcio", "protobuf", "googleapis-common-protos", "typing_extensions"}
assert names <= expected, f"the client brings {names - expected}"
there = [name for name in ("common", "kernels", "router", "worker") if find_spec(name)]
assert not there, f"the client installs top-level packages {there}"
print("== installed with the client:", ", ".join(sorted(names)))
PYTHON

echo "== $(basename "$wheel"), $(du -k "$wheel" | cut -f1) KiB"
"${PYTHON:-python3}" -m venv "$folder/service"
pip_install service "$torch" 2>/dev/null || pip_install service --index-url https://download.pytorch.org/whl/cpu "$torch"
pip_install service "$client" "${wheel}[router,worker,http,cpu]"
(alone service python -) <<'PYTHON'
import shutil

from kernels.cpu import build, instruction_sets, library

assert not any(map(shutil.which, build.COMPILERS)), "a compiler is on the PATH"
loaded = library.load()
abilities = library.abilities(loaded)
missing = set(instruction_sets.CHOICES) - {instruction_sets.AUTO} - set(abilities)
assert not missing, f"the library lacks {missing}"
print("== instruction sets:", ", ".join(abilities), "- here:", instruction_sets.take(loaded))
PYTHON
(alone service fissile serve --model "$model" --port 0 --ask --once)

port=$("$folder/service/bin/python" -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')
alone service fissile serve --model "$model" --port "$port" --no-ask 2>"$folder/serve.log" &
serving=$!
(alone client python - "127.0.0.1:$port") <<'PYTHON' || { cat "$folder/serve.log" >&2; exit 1; }
import sys

from fissile.client import Client

with Client(sys.argv[1], give_up_s=120) as client:
    answer = client.chat("Spell cat.", temperature=0, max_tokens=16)
assert answer.text, "the answer is empty"
print("== the client alone is answered:", answer.text.strip())
PYTHON
echo "== the wheels install, serve and call"
