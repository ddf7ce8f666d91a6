#!/bin/bash
set -euo pipefail
cd /app
echo service,errors > report.csv
awk '$2 == "[ERROR]" { sub(":", "", $3); n[$3]++ } END { for (s in n) print s "," n[s] }' service.log |
    sort -t, -k2,2nr -k1,1 >> report.csv
