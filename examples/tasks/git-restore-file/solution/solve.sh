#!/bin/bash
set -euo pipefail
cd /app/repo
deletion=$(git rev-list -n 1 HEAD -- config/limits.ini)
git checkout -q "$deletion^" -- config/limits.ini
git commit -q -m 'Restore the limits'
