#!/bin/bash -p
# A clean environment and an isolated interpreter: nothing that the agent left is sourced.
exec /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/nonexistent LANG=C.UTF-8 \
    /usr/bin/python3 -I -S -B /tests/check.py
