#!/bin/bash
set -euo pipefail
grep -c '[^[:space:]]' /app/journal.txt > /app/count.txt
