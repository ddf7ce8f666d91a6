#!/bin/bash
set -euo pipefail
cd /app
touch banana.txt
