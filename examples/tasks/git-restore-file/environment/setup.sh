#!/bin/bash
set -euo pipefail
mkdir -p /app

export GIT_AUTHOR_NAME=Robin GIT_AUTHOR_EMAIL=robin@example.com
export GIT_COMMITTER_NAME=Robin GIT_COMMITTER_EMAIL=robin@example.com
commit() { # message, hour: fixed dates make fixed hashes
    git add -A
    GIT_AUTHOR_DATE="2024-02-01T$2:00:00Z" GIT_COMMITTER_DATE="2024-02-01T$2:00:00Z" \
        git commit -q -m "$1"
}
git init -q -b main /app/repo
cd /app/repo
git config user.name Robin
git config user.email robin@example.com
git config commit.gpgsign false
mkdir config
printf '[limits]\nconnections = 20\n' > config/limits.ini
printf 'service\n' > README
commit 'First version' 08
printf '[limits]\nconnections = 50\ntimeout = 30\n' > config/limits.ini
commit 'Raise the limits' 09
printf 'debug = false\n' > config/app.ini
commit 'Add the application settings' 10
git rm -q config/limits.ini
printf 'service, second edition\n' > README
commit 'Tidy up' 11
printf 'debug = true\n' > config/app.ini
commit 'Debug' 12
