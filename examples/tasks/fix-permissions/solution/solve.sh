#!/bin/bash
set -euo pipefail
cd /app/site
find . -type d -exec chmod 755 {} +
find public -type f -exec chmod 644 {} +
chmod 755 bin/*
chmod 600 keys/*
