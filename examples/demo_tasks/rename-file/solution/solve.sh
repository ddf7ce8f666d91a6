#!/bin/bash
set -euo pipefail
cd /app
mv draft.txt final.txt
