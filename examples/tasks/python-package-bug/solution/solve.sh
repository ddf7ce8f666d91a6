#!/bin/bash
set -euo pipefail
cd /app
python3 - <<'EOF'
from pathlib import Path

path = Path("/app/intervals/core.py")
code = path.read_text()
code = code.replace("start < merged[-1][1]:", "start <= merged[-1][1]:")
code = code.replace("(merged[-1][0], end)", "(merged[-1][0], max(merged[-1][1], end))")
code = code.replace("for start, end in intervals)", "for start, end in merge(intervals))")
path.write_text(code)
EOF
python3 -m unittest discover -s tests
