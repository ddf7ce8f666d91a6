#!/bin/bash
set -euo pipefail
cd /app/repo
git branch recovered "$(git log -g --format='%H %s' main | awk '/Fourth note/ { print $1; exit }')"
