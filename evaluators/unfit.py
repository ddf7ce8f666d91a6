"""The fault of a task whose own image or repository cannot be used for its tests."""

from evaluators.base import EvaluatorFault


class TaskUnfit(EvaluatorFault):
    """Say that the prepared sandbox lacks what the tests need, whatever the agent did."""

    code = "evaluator.task_unfit"
    is_graders = True
