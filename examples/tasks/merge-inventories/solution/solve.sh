#!/bin/bash
set -euo pipefail
python3 - <<'EOF'
import json

merged = {}
for shop in ("north", "south"):
    with open(f"/app/{shop}.json", encoding="utf-8") as source:
        for row in json.load(source):
            entry = merged.setdefault(
                row["sku"], {"name": row["name"], "quantity": 0, "price": row["price"]}
            )
            entry["quantity"] += row["quantity"]
            entry["price"] = min(entry["price"], row["price"])
with open("/app/merged.json", "w", encoding="utf-8") as target:
    json.dump({sku: entry for sku, entry in merged.items() if entry["quantity"]}, target)
EOF
