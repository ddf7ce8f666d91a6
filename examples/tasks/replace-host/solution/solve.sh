#!/bin/bash
set -euo pipefail
find /app/conf -type f -name '*.conf' -exec \
    sed -i '/^#/!s/old\.example\.com/new.example.net/g' {} +
