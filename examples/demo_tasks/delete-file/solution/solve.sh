#!/bin/bash
set -euo pipefail
cd /app
rm old.log
