#!/bin/bash
set -euo pipefail
awk '$(NF-2) == 200 { n[$7]++; t[$7] += $NF } END { for (p in n) printf "%s %.1f\n", p, t[p] / n[p] }' \
    /app/access.log | sort -k2,2nr | head -n 3 > /app/slowest.txt
