#!/usr/bin/env python
"""Run Django's command line for the rollout service."""

import os
import sys


def main() -> None:
    """Hand the arguments to Django."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "prorl_site.settings.base")
    from django.core.management import execute_from_command_line

    from prorl_site.env import SettingError

    try:
        execute_from_command_line(sys.argv)
    except SettingError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
