"""Make a trainer's account and a token, whose text is printed once."""

from argparse import ArgumentParser
from datetime import timedelta
from typing import Any

from django.contrib.auth import get_user_model
from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError

from rollouts.exceptions import RolloutError
from rollouts.models.token import Scope
from rollouts.services.tokens import create_token

DEFAULT_SCOPES = (Scope.READ, Scope.SUBMIT, Scope.POLICY)


class Command(BaseCommand):
    """Print a new token of an account, which is made when missing; it cannot log in."""

    help = __doc__ or ""

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the arguments."""
        parser.add_argument("name", help="name of the account and of the token")
        parser.add_argument(
            "--scopes",
            nargs="+",
            choices=Scope.values,
            default=[scope.value for scope in DEFAULT_SCOPES],
            help="what the token may do (default: %(default)s)",
        )
        parser.add_argument("--quiet", action="store_true", help="print nothing but the token")
        parser.add_argument("--days", type=int, default=90, help="lifetime (default: %(default)s)")

    def handle(self, *_args: Any, **options: Any) -> None:
        """Make the account and the token; only the token goes to standard output."""
        if not 1 <= options["days"] <= 3650:
            raise CommandError(f"--days is {options['days']}; give 1 to 3650.")
        users = get_user_model()
        user = users.objects.filter(username=options["name"]).first()
        if user is None:
            user = users(username=options["name"])
            user.set_unusable_password()
            try:
                user.full_clean()
            except ValidationError as error:
                raise CommandError("; ".join(error.messages)) from error
            user.save()
        try:
            token, text = create_token(
                user=user,
                name=options["name"],
                scopes=options["scopes"],
                lifetime=timedelta(days=options["days"]),
            )
        except RolloutError as error:
            raise CommandError(str(error)) from error
        note = (
            f"Token of {user.get_username()} until {token.expiry:%Y-%m-%d}, for "
            f"{', '.join(token.scopes)}. It is stored nowhere: copy it now."
        )
        if not options["quiet"]:
            self.stderr.write(note)
        self.stdout.write(text)
