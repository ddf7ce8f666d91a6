#!/bin/bash
set -euo pipefail
cd /app
echo hello > note.txt
