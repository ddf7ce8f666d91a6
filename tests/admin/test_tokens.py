"""Tokens: the text is shown once, kept nowhere, and can be revoked."""

import re
from datetime import timedelta

import pytest
from django.utils import timezone

from rollouts.models import Experiment, TrainerToken
from tests.admin.factories import make_experiment, make_token, make_user

pytestmark = pytest.mark.django_db


def form_of(user, **changes: object) -> dict[str, object]:
    return {
        "user": user.pk,
        "name": "laptop",
        "scopes": ["read", "submit"],
        "experiments": [],
        "days": 30,
        **changes,
    }


def test_the_text_is_shown_once_and_works(operator) -> None:
    from knox.crypto import hash_token

    user = make_user()
    experiment = make_experiment(owner=user)

    answer = operator.post(TrainerToken, "add", form_of(user, experiments=[experiment.pk]))

    assert answer.status_code == 200
    assert "no-store" in answer["Cache-Control"]
    text = re.search(r'<code id="token"[^>]*>([^<]+)</code>', answer.content.decode())[1]
    token = TrainerToken.objects.get()
    assert token.digest == hash_token(text)
    assert (token.user, token.name, token.scopes) == (user, "laptop", ["read", "submit"])
    assert list(token.experiments.all()) == [experiment]
    assert abs(token.expiry - timezone.now() - timedelta(days=30)) < timedelta(minutes=5)
    for page in (operator.get(TrainerToken), operator.get(TrainerToken, "change", token.pk)):
        assert text not in page.content.decode()
    assert text not in str(list(operator.client.session.items()))
    assert all(text not in cookie.value for cookie in operator.client.cookies.values())


@pytest.mark.parametrize("bound", [True, False])
def test_a_token_made_for_an_experiment_is_bound_to_it(operator, bound) -> None:
    user = make_user()
    own = make_experiment(owner=user)
    make_experiment(owner=user)
    chosen = [own.pk] if bound else []

    operator.post(TrainerToken, "add", form_of(user, experiments=chosen))

    token = TrainerToken.objects.get()
    assert token.is_bound is bound
    assert Experiment.objects.visible_to(user, token).count() == (1 if bound else 2)


def test_the_form_has_one_way_to_save(operator) -> None:
    page = operator.get(TrainerToken, "add").content.decode()

    assert 'name="_save"' in page
    assert "_addanother" not in page
    assert "_continue" not in page


@pytest.mark.parametrize(
    ("field", "value"),
    [("scopes", []), ("scopes", ["root"]), ("days", 0), ("days", 5000), ("name", ""), ("user", "")],
)
def test_a_wrong_form_makes_no_token(operator, field, value) -> None:
    answer = operator.post(TrainerToken, "add", {**form_of(make_user()), field: value})

    assert field in answer.context["adminform"].form.errors
    assert not TrainerToken.objects.exists()


def test_a_token_is_not_bound_to_another_users_experiment(operator) -> None:
    foreign = make_experiment()

    answer = operator.post(TrainerToken, "add", form_of(make_user(), experiments=[foreign.pk]))

    assert answer.context["adminform"].form.errors["experiments"] == [
        f"{foreign} belongs to another user."
    ]
    assert not TrainerToken.objects.exists()


def test_a_token_cannot_be_changed_or_deleted_here(operator) -> None:
    token = make_token()

    assert operator.post(TrainerToken, "change", {"name": "x"}, token.pk).status_code == 403
    assert operator.post(TrainerToken, "delete", {"post": "yes"}, token.pk).status_code == 403
    assert TrainerToken.objects.get(pk=token.pk).name == token.name


def test_revoking_twice_keeps_the_first_time(operator) -> None:
    token = make_token()

    assert operator.act(TrainerToken, "revoke", token) == "Revoke: 1 done, 0 skipped, 0 failed."
    first = TrainerToken.objects.get(pk=token.pk).revoked_at
    assert operator.act(TrainerToken, "revoke", token) == (
        f"Revoke: 0 done, 1 skipped, 0 failed. {token}: It was revoked already."
    )
    assert first is not None
    assert TrainerToken.objects.get(pk=token.pk).revoked_at == first
