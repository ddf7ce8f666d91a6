"""Admin of trainers' tokens: the text is shown once, on the answer to its making."""

from datetime import timedelta
from typing import Any, ClassVar

from django import forms
from django.contrib import admin
from django.core.exceptions import ValidationError
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse

from rollouts.admin.actions import act
from rollouts.exceptions import StateConflict
from rollouts.models import TrainerToken
from rollouts.models.token import Scope
from rollouts.services.tokens import create_token, revoke_token
from sandboxes.admin.base import BaseAdmin

MAX_DAYS = 3650


class TokenForm(forms.ModelForm):  # type: ignore[type-arg]
    """Ask what a new token may do, and for how long."""

    scopes = forms.MultipleChoiceField(
        choices=Scope.choices,
        initial=[Scope.READ, Scope.SUBMIT, Scope.POLICY],
        widget=forms.CheckboxSelectMultiple,
    )
    days = forms.IntegerField(
        min_value=1, max_value=MAX_DAYS, initial=90, help_text="The token works that long."
    )

    class Meta:
        model = TrainerToken
        fields = ("user", "name", "scopes", "experiments")
        help_texts: ClassVar[dict[str, str]] = {
            "name": "Where it will be used.",
            "experiments": "Empty: the token reaches all that its user owns.",
        }

    def clean(self) -> dict[str, Any]:
        """Refuse experiments that the user could not reach anyway."""
        values: dict[str, Any] = super().clean() or self.cleaned_data
        user = values.get("user")
        if user is not None and not user.is_staff:
            foreign = [row for row in values.get("experiments", []) if row.owner_id != user.pk]
            if foreign:
                self.add_error(
                    "experiments", ValidationError(f"{foreign[0]} belongs to another user.")
                )
        return values


@admin.register(TrainerToken)
class TrainerTokenAdmin(BaseAdmin):
    """Make and revoke tokens; one that exists is not changed."""

    form = TokenForm
    list_display = [
        "name",
        "user",
        "token_key",
        "scopes_shown",
        "created",
        "expiry",
        "used_at",
        "revoked_at",
    ]
    list_select_related = ["user"]
    list_filter = ["revoked_at"]
    search_fields = ["name"]
    search_ids = ()
    search_prefixes = ("name", "token_key", "user__username")
    autocomplete_fields = ["user", "experiments"]
    actions = ["revoke"]

    def get_fields(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        """Return what is asked of a new token, or what is known of an old one."""
        if obj is None:
            return ["user", "name", "scopes", "experiments", "days"]
        return [
            "user",
            "name",
            "token_key",
            "scopes_shown",
            "experiments",
            "created",
            "expiry",
            "used_at",
            "revoked_at",
        ]

    def add_view(
        self, request: HttpRequest, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Offer one way to save: the text is on the page that follows, and nowhere else."""
        one_way = {"show_save_and_add_another": False, "show_save_and_continue": False}
        return super().add_view(request, form_url, {**one_way, **(extra_context or {})})

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Refuse: revoke a token and make another."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Refuse: a revoked token stays as a record."""
        return False

    def has_operate_permission(self, request: HttpRequest) -> bool:
        """Allow revoking to those who may change tokens."""
        return bool(request.user.has_perm("rollouts.change_trainertoken"))

    @admin.display(description="scopes")
    def scopes_shown(self, token: TrainerToken) -> str:
        """Return the scopes as words."""
        return ", ".join(token.scopes)

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        """Make the token; its text lives only in this request."""
        values = form.cleaned_data
        saved, text = create_token(
            user=values["user"],
            name=values["name"],
            scopes=values["scopes"],
            experiments=list(values["experiments"]),
            lifetime=timedelta(days=values["days"]),
        )
        obj.pk, obj.digest, obj.token_key = saved.pk, saved.digest, saved.token_key
        obj._state.adding = False
        obj.shown_once = text

    def response_add(
        self, request: HttpRequest, obj: Any, post_url_continue: str | None = None
    ) -> HttpResponse:
        """Show the text once, on a page that nothing keeps."""
        context = {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "title": "Token made",
            "token": obj,
            "text": obj.shown_once,
        }
        answer = TemplateResponse(request, "admin/rollouts/trainertoken/created.html", context)
        answer["Cache-Control"] = "no-store"
        return answer

    @admin.action(description="Revoke", permissions=["operate"])
    def revoke(self, request: HttpRequest, rows: QuerySet[TrainerToken]) -> None:
        """Refuse tokens from now on."""
        act(self, request, rows, verb="Revoke", call=_revoke)


def _revoke(token: TrainerToken) -> None:
    if token.revoked_at is not None:
        raise StateConflict("It was revoked already.")
    revoke_token(token=token)
