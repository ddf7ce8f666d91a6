"""Accounts of operators and trainers."""

from datetime import timedelta

import pytest
from django.contrib.auth import authenticate, get_user_model
from django.core.management.base import CommandError
from django.utils import timezone
from knox.crypto import hash_token

from rollouts.models import TrainerToken
from tests.unit.commands.calls import call

pytestmark = pytest.mark.django_db


def test_a_trainer_gets_a_token_that_is_printed_once() -> None:
    called = call("create_trainer", "trl", "--scopes", "read", "submit", "--days", "7")

    text = called.out.strip()
    token = TrainerToken.objects.get()
    assert token.digest == hash_token(text)
    assert (token.user.get_username(), token.name) == ("trl", "trl")
    assert token.scopes == ["read", "submit"]
    assert not token.user.has_usable_password()
    assert not token.user.is_staff
    assert abs(token.expiry - timezone.now() - timedelta(days=7)) < timedelta(minutes=5)
    assert text not in called.err
    assert "copy it now" in called.err


def test_quiet_prints_the_token_alone() -> None:
    called = call("create_trainer", "trl", "--quiet")

    assert TrainerToken.objects.get().digest == hash_token(called.out.removesuffix("\n"))
    assert called.err == ""


def test_a_second_token_belongs_to_the_same_account() -> None:
    first = call("create_trainer", "trl").out
    second = call("create_trainer", "trl").out

    assert first != second
    assert get_user_model().objects.filter(username="trl").count() == 1
    assert TrainerToken.objects.filter(user__username="trl").count() == 2


@pytest.mark.parametrize(
    "arguments",
    [("trl", "--days", "0"), ("trl", "--days", "4000"), ("trl", "--scopes", "root"), ("no name!",)],
)
def test_a_wrong_call_makes_nothing(arguments) -> None:
    with pytest.raises(CommandError):
        call("create_trainer", *arguments)

    assert not get_user_model().objects.exists()
    assert not TrainerToken.objects.exists()


def test_an_operator_can_log_in_and_get_a_new_password() -> None:
    first = call("create_operator", "boss").out.strip()
    user = authenticate(username="boss", password=first)
    assert user is not None
    assert (user.is_staff, user.is_superuser) == (True, True)

    call("create_operator", "boss", "--password", "another-long-one-7")

    assert authenticate(username="boss", password=first) is None
    assert authenticate(username="boss", password="another-long-one-7") == user


def test_a_weak_password_is_refused_and_no_account_made() -> None:
    with pytest.raises(CommandError, match="too short"):
        call("create_operator", "boss", "--password", "abc")

    assert not get_user_model().objects.exists()
