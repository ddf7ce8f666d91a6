#!/bin/bash
set -euo pipefail
mkdir -p /app
cp -r /setup/files/. /app/
