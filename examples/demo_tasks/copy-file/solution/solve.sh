#!/bin/bash
set -euo pipefail
cd /app
cp red.txt blue.txt
