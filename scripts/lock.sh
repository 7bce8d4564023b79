#!/usr/bin/env bash
# Makes requirements/*.lock anew: the newest versions that pyproject.toml and requirements/docs.in allow, for every Python
# and processor that Fissile supports on Linux. scripts/setup.sh installs no others. PyTorch itself is not among them: the
# `cpu` extra pins its build; nor is `fissile-client`, which is in protos/.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=build/lock
[ -x "$venv/bin/uv" ] || { python3 -m venv "$venv" && "$venv/bin/python" -m pip install --quiet --disable-pip-version-check uv==0.13.9; }

# lock NAME SOURCE OPTION...: makes requirements/NAME.lock.
lock() {
  local name=$1
  shift
  # Where PyTorch's CPU build is: pip's own folder of wheels, if it has one, or PyTorch's index.
  "$venv/bin/uv" pip compile --quiet --upgrade --universal --python-version 3.11 --no-emit-package torch --no-emit-package fissile-client \
    --find-links "${PIP_FIND_LINKS:-https://download.pytorch.org/whl/cpu/torch/}" \
    --custom-compile-command "make lock" --no-annotate "$@" -o "requirements/$name.lock"
}

lock tests pyproject.toml --extra router --extra worker --extra http --extra smg --extra cpu --extra tests
lock docs requirements/docs.in
