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
printf 'one\n' > notes.txt
commit 'Start' 08
printf 'one\ntwo\n' > notes.txt
commit 'Second note' 09
printf 'three\n' > lost.txt
commit 'Third note' 10
printf 'three\nfour\n' > lost.txt
commit 'Fourth note' 11
git reset -q --hard HEAD~2
printf 'other\n' > other.txt
commit 'Other work' 12
