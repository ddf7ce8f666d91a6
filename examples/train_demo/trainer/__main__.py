"""Train: `python -m examples.train_demo.trainer`, with PRORL_URL and PRORL_TOKEN set."""

import argparse
import sys
from dataclasses import fields
from pathlib import Path

import torch
from prorl_client import Client

from examples.train_demo.trainer.learner import Disagreement, Learner
from examples.train_demo.trainer.model import SmallModel
from examples.train_demo.trainer.run import Settings, save_row, train

DISAGREES = 3


def main() -> int:
    """Run the training; 3 when the log-probabilities of a batch do not agree."""
    parser = argparse.ArgumentParser(prog="python -m examples.train_demo.trainer")
    parser.add_argument("--model", type=Path, required=True, help="the model's GGUF file")
    parser.add_argument("--rows", type=Path, required=True, help="where the steps are written")
    for field in fields(Settings):
        name = f"--{field.name.replace('_', '-')}"
        if field.type in (int, float):
            parser.add_argument(name, type=field.type, default=field.default)
        else:
            parser.add_argument(name, type=field.type, required=True)
    options = vars(parser.parse_args())
    settings = Settings(**{field.name: options[field.name] for field in fields(Settings)})
    torch.manual_seed(settings.seed)
    # One core: the other one samples and grades the next batch meanwhile.
    torch.set_num_threads(1)
    model = SmallModel(options["model"], settings.trained_layers)
    learner = Learner(
        model,
        learning_rate=settings.learning_rate,
        clip=(settings.clip_low, settings.clip_high),
        passes=settings.passes,
        kept=settings.max_policy_lag + 2,
    )
    with Client() as client:
        try:
            for row in train(client, learner, settings):
                save_row(options["rows"], row)
        except Disagreement as fault:
            sys.stderr.write(f"{fault}\n")
            return DISAGREES
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
