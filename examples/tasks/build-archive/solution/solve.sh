#!/bin/bash
set -euo pipefail
cd /app
stage=$(mktemp -d)
cp -r src/greet "$stage/greet"
rm -rf "$stage"/greet/test_*.py "$stage/greet/__pycache__"
printf 'VERSION = "%s"\n' "$(cat VERSION)" > "$stage/greet/_version.py"
mkdir -p dist
python3 -m zipapp "$stage" -m greet.cli:main -o dist/greet.pyz
rm -rf "$stage"
