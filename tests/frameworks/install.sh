#!/usr/bin/env bash
# Prints the folder of Pythons that have frameworks in them, for the tests that read what these write:
# .cache/frameworks/NAME, as requirements/NAME.txt beside this file says, over what shared.txt says. Each is kept
# until its file changes. What cannot be installed is said in one line and kept as NAME.absent, for the tests that
# are skipped then. PYTHON names the Python with pip in it to make them with; torch is taken from it, too.
set -u
cd "$(dirname "$0")/../.." || exit 1
python=${PYTHON:-python3}
files=$PWD/tests/frameworks/requirements
cache=$PWD/.cache/frameworks
mkdir -p "$cache"

absent() {  # NAME REASON: there is no such Python, for that reason
  rm -rf "${cache:?}/$1"
  printf '%s\n' "$2" >"$cache/$1.absent"
}

packages() {  # NAME: the folder of its packages
  echo "$cache/$1"/lib/python*/site-packages
}

install() {  # NAME: its Python from nothing, with what pip says; nothing is compiled, as little of it is imported
  "$python" -m venv --without-pip "$cache/$1" &&
    "$python" -m pip --disable-pip-version-check --python "$cache/$1/bin/python" \
      install --quiet --no-deps --no-compile --retries 2 --timeout 30 -r "$files/$1.txt" 2>&1
}

made() {  # NAME: whether there is such a Python, after trying to make it
  local wanted said reason
  wanted=$(cat "$files/$1.txt" && "$python" -VV && echo "$cache")
  [ "$(cat "$cache/$1/made-of" 2>/dev/null)" = "$wanted" ] && return
  echo "Installing frameworks that tests read the logs of: $1 ..." >&2
  rm -rf "${cache:?}/$1" "$cache/$1.absent"
  if said=$(install "$1"); then
    case $1 in
      shared) ;;
      trl | verl) dirname "$(dirname "$torch")" >"$(packages "$1")/tests.pth" ;;  # torch, and all that we need
      *) packages shared >"$(packages "$1")/shared.pth" ;;
    esac
    printf '%s\n' "$wanted" >"$cache/$1/made-of"
    return
  fi
  reason=$(grep -a '^ERROR' <<<"$said" | tail -1 | cut -c1-200)
  grep -qa 'connection broken' <<<"$said" && reason="no package index can be reached (${reason#ERROR: })"
  absent "$1" "${reason:-$(tail -1 <<<"$said")}"
  echo "$1 could not be installed, so the tests that need it are skipped: $(cat "$cache/$1.absent")" >&2
  return 1
}

# Too large to be there twice.
torch=$("$python" -c 'import importlib.util as u; found = u.find_spec("torch"); print(found.origin if found else "")')

made shared
# The others one beside another: most of the time pip waits, or has one core at work.
for file in "$files"/*.txt; do
  name=$(basename "$file" .txt)
  if [ -f "$cache/shared.absent" ]; then
    absent "$name" "$(cat "$cache/shared.absent")"
  elif [[ $name =~ ^(tinker|trl|verl)$ ]] && [ -z "$torch" ]; then
    absent "$name" "there is no torch in $python"
  elif [ "$name" != shared ]; then
    made "$name" &
  fi
done
wait

# Data of other packages' own tests, which is in no wheel; tests that need it are skipped without it.
peers=$cache/peers
mkdir -p "$peers"
renderers=$(grep '^renderers==' "$files/shared.txt")
if [ ! -d "$peers/${renderers/==/-}" ]; then
  "$python" -m pip --disable-pip-version-check download --quiet --no-deps --no-binary renderers --retries 2 --timeout 30 \
    -d "$peers" "$renderers" >/dev/null 2>&1 && tar -xzf "$peers/${renderers/==/-}.tar.gz" -C "$peers"
fi
common=$(sed -n 's/^mistral-common==//p' "$files/templates.txt")
[ -d "$peers/mistral-common" ] || GIT_TERMINAL_PROMPT=0 timeout 60 git clone --quiet --depth 1 --branch "v$common" \
  https://github.com/mistralai/mistral-common "$peers/mistral-common" 2>/dev/null
[ ! -f "$cache/tinker/made-of" ] || ln -sfn "${torch%/torch/*}"/{torch,torchgen,torch-*.dist-info} "$(packages tinker)/"
printf '%s\n' "$cache"
