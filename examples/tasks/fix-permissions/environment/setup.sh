#!/bin/bash
set -euo pipefail
mkdir -p /app
cp -r /setup/files/. /app/
chmod 777 /app/site /app/site/keys
chmod 700 /app/site/public /app/site/public/css
chmod 666 /app/site/public/index.html /app/site/keys/site.key
chmod 700 '/app/site/public/css/main style.css'
chmod 644 /app/site/bin/start /app/site/bin/stop
