#!/usr/bin/env bash
# Everything a change has to pass, and how long each part of it took: `tests/suite.sh quick` for `make test`,
# `tests/suite.sh deep [COMMIT]` for `make deep`, with a commit for the tests of what changed since then.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
tier=$1 since=${2:-}
python=${PYTHON:-.venv/bin/python}

shown() {  # WHAT SECONDS
  printf '%-28s %3d min %02d s\n' "$1" $(($2 / 60)) $(($2 % 60))
}

names() {  # LINES ELSE: the last parts of paths in one line
  local found
  found=$(xargs -rn1 basename <<<"$1" | xargs)
  echo "${found:-$2}"
}

types() {  # what mypy says, once it has said it
  wait "$typing"
  local code=$?
  cat "$aside/types"
  return $code
}

begun=$SECONDS
aside=$(mktemp -d "${TMPDIR:-/tmp}/t.XXXX")
# Installed first: what follows runs side by side, and two installs at once spoil each other.
[ "$python" != .venv/bin/python ] || make --no-print-directory .venv/.installed-dev || exit
"$python" -m ruff check . && "$python" -m ruff format --check . || exit
# Types, what is fetched and the tests need not wait for each other.
"$python" -m mypy >"$aside/types" 2>&1 &
typing=$!
trap 'rm -rf "$aside"; kill $typing 2>/dev/null' EXIT
[ -n "${TITO_AUDIT_VALIDATORS+said}" ] || PYTHON=$python tests/validators.sh >"$aside/validators" &
fetching=$!
make --no-print-directory torch || exit
real=${TITO_AUDIT_TOKENIZERS-$(tests/real_tokenizers.sh)}
frameworks=${TITO_AUDIT_FRAMEWORKS-$(PYTHON=$python tests/frameworks/install.sh)}
wait "$fetching"
validators=${TITO_AUDIT_VALIDATORS-$(cat "$aside/validators")}
export TITO_AUDIT_TOKENIZERS=$real TITO_AUDIT_FRAMEWORKS=$frameworks TITO_AUDIT_VALIDATORS=$validators
browser=$(command -v chromedriver >/dev/null && for name in chromium chromium-browser google-chrome; do
  command -v $name && break
done)
skipped="none, so their tests are skipped"
for kind in rollouts recorded; do
  echo "real $kind beside the checkout: $(names "$(ls -d ../shared/$kind/*/ ../shared/$kind/*.json 2>/dev/null)" "$skipped")"
done
echo "real tokenizers: $(names "$([ -n "$real" ] && ls -d "$real"/*/)" "$skipped")"
pythons=$([ -n "$frameworks" ] && ls -d "$frameworks"/*/bin 2>/dev/null | xargs -rn1 dirname | grep -v '/shared$')
echo "Pythons with frameworks: $(names "$pythons" "$skipped")"
echo "a vLLM server: $([ "${TITO_AUDIT_VLLM-}" != off ] && [ -x .cache/vllm/bin/python ] && echo .cache/vllm || echo "$skipped")"
echo "a browser for pages: ${browser:-$skipped}"
echo "schemas that reports are held against: $(names "$([ -n "$validators" ] && ls "$validators")" "$skipped")"
installs=$((SECONDS - begun))

files=()
if [ -n "$since" ]; then
  chosen=$("$python" -m tests.since "$since") || exit
  [ -n "$chosen" ] || { echo "Nothing that a test depends on changed since $since."; types; exit; }
  mapfile -t files <<<"$chosen"
  echo "Whole, for what changed since $since: $(names "$chosen" none)"
fi
begun=$SECONDS
# A process more than there are cores, as some tests wait for servers; one that is done takes tests of another.
cores=$("$python" -c 'import os
print(1 + (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))')
[ "$tier" = quick ] || export TITO_AUDIT_KILLS=${TITO_AUDIT_KILLS-50} TITO_AUDIT_SLOW=1
# The folder has a short path: pages of 80 columns, which tests compare, break long ones.
export TITO_AUDIT_TIER=$tier
# What every process imports is compiled once, not by each of them.
"$python" -m compileall -q -j 0 tito_audit tests benchmarks tools >/dev/null
# An assert that says what it compared costs each process ten seconds of reading: only those that failed run again for it.
"$python" -m pytest -q -rs -n "${TITO_AUDIT_CORES:-$cores}" --dist worksteal --basetemp "$aside/b" --assert plain \
  "${files[@]}"
code=$?
[ $code -ne 1 ] || "$python" -m pytest -q --last-failed --last-failed-no-failures none --basetemp "$aside/b" "${files[@]}"
tests=$((SECONDS - begun))
types
typed=$?

shown "Installs and style" $installs
shown "Tests ($tier)" $tests
shown "Everything" $SECONDS
[ $code -ne 0 ] || exit $typed
exit $code
