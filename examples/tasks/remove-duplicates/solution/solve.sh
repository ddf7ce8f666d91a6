#!/bin/bash
set -euo pipefail
cd /app
find docs -type f -print0 | LC_ALL=C sort -z | while IFS= read -r -d '' file; do
    sum=$(sha256sum < "$file")
    if grep -qxF -- "$sum" /tmp/seen 2>/dev/null; then
        rm -- "$file"
    else
        printf '%s\n' "$sum" >> /tmp/seen
    fi
done
rm -f /tmp/seen
