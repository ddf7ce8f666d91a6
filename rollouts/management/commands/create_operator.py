"""Make an operator's account, or give one that exists a new password."""

import secrets
from argparse import ArgumentParser
from typing import Any

from django.contrib.auth import get_user_model
from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError


class Command(BaseCommand):
    """Print the password once; it is chosen by chance unless given."""

    help = __doc__ or ""

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the arguments."""
        parser.add_argument("name")
        parser.add_argument(
            "--password", help="seen by everybody who can list processes: leave it out where shared"
        )

    def handle(self, *_args: Any, **options: Any) -> None:
        """Save the account with every permission."""
        users = get_user_model()
        password = options["password"] or secrets.token_urlsafe(15)
        user = users.objects.filter(username=options["name"]).first()
        user = user or users(username=options["name"])
        user.is_staff = user.is_superuser = user.is_active = True
        user.set_password(password)
        try:
            validate_password(password, user)
            user.full_clean()
        except ValidationError as error:
            raise CommandError("; ".join(error.messages)) from error
        user.save()
        self.stderr.write(f"Operator {user.get_username()} can log in to the admin; password:")
        self.stdout.write(password)
