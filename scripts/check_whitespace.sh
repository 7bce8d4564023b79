#!/usr/bin/env bash
# check_whitespace.sh FILE...: names lines that end with a space or tab, and files that do not end with one newline.
set -euo pipefail
failed=0
for file; do
  if grep -nHE '[[:blank:]]+$' "$file"; then failed=1; fi
  if [ -s "$file" ] && { [ -n "$(tail -c 1 "$file")" ] || [ -z "$(tail -n 1 "$file")" ]; }; then
    echo "$file: does not end with one newline"
    failed=1
  fi
done
exit "$failed"
