"""What a pulling experiment draws from: the order of an epoch, what returned, what was learnt."""

from django.db import models

from rollouts.models.experiment import Experiment
from rollouts.models.task import Task


class FeedPlan(models.Model):
    """The order of an experiment's tasks in one epoch, fixed when the epoch begins.

    `tasks` holds 16 bytes for each: its id. Reading a slice costs the slice, not the plan.
    """

    id = models.BigAutoField(primary_key=True)
    experiment = models.ForeignKey(Experiment, on_delete=models.CASCADE, related_name="plans")
    epoch = models.PositiveIntegerField()
    size = models.PositiveBigIntegerField()
    tasks = models.BinaryField()
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["experiment", "epoch"]
        constraints = [
            models.UniqueConstraint(fields=["experiment", "epoch"], name="plan_epoch_unique"),
        ]

    def __str__(self) -> str:
        return f"epoch {self.epoch} of {self.experiment_id}"


class FeedReturn(models.Model):
    """A task whose group left without being consumed: it is drawn again before the plan goes on."""

    id = models.BigAutoField(primary_key=True)
    experiment = models.ForeignKey(Experiment, on_delete=models.CASCADE, related_name="returns")
    epoch = models.PositiveIntegerField()
    position = models.PositiveBigIntegerField()
    task = models.ForeignKey(Task, on_delete=models.CASCADE, related_name="+")
    reason = models.CharField(max_length=64)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["experiment", "epoch", "position"]
        constraints = [
            models.UniqueConstraint(
                fields=["experiment", "epoch", "position"], name="return_place_unique"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.task_id} at {self.epoch}.{self.position}"


class TaskProgress(models.Model):
    """How often an experiment's policy solved a task."""

    id = models.BigAutoField(primary_key=True)
    experiment = models.ForeignKey(Experiment, on_delete=models.CASCADE, related_name="progress")
    task = models.ForeignKey(Task, on_delete=models.CASCADE, related_name="progress")
    groups = models.PositiveIntegerField(default=0)
    samples = models.PositiveIntegerField(default=0, help_text="Scored ones.")
    right = models.PositiveIntegerField(default=0)
    last_epoch = models.PositiveIntegerField(null=True)
    updated_at = models.DateTimeField(auto_now=True)

    class Meta:
        ordering = ["experiment", "task"]
        verbose_name_plural = "task progress"
        constraints = [
            models.UniqueConstraint(fields=["experiment", "task"], name="progress_task_unique"),
            models.CheckConstraint(
                name="progress_right_within_samples",
                condition=models.Q(right__lte=models.F("samples")),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.right} of {self.samples} of {self.task_id}"
