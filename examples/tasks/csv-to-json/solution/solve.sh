#!/bin/bash
set -euo pipefail
python3 - <<'EOF'
import csv
import json

with open("/app/members.csv", encoding="utf-8", newline="") as source:
    rows = list(csv.DictReader(source))
for row in rows:
    for key, value in row.items():
        row[key] = value or None
    row["id"] = int(row["id"])
    row["score"] = None if row["score"] is None else float(row["score"])
rows.sort(key=lambda row: row["id"])
with open("/app/members.json", "w", encoding="utf-8") as target:
    json.dump(rows, target, ensure_ascii=False, indent=2)
EOF
