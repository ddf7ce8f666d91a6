"""Write the curve and the table of a run: `python -m examples.train_demo.trainer.report`."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from examples.train_demo.verdict import MAX_DIFFERENCE, Rows, summary

COLUMNS = {
    "step": ("step", "{:d}"),
    "seconds": ("s", "{:.0f}"),
    "version": ("version", "{:d}"),
    "lag": ("lag", "{:d}"),
    "reward": ("mean reward", "{:.3f}"),
    "opened": ("box opened", "{:.3f}"),
    "said": ("code said", "{:.3f}"),
    "tokens": ("tokens", "{:d}"),
    "largest_difference": ("largest difference", "{:.1e}"),
    "mean_difference": ("mean difference", "{:.1e}"),
    "gradient_norm": ("gradient norm", "{:.2f}"),
    "waited": ("waited s", "{:.1f}"),
    "learnt": ("learnt s", "{:.1f}"),
    "exchanged": ("exchanged s", "{:.1f}"),
}


def draw(rows: Rows, path: Path) -> None:
    """Draw the rewards and the differences over the steps."""
    steps = [row["step"] for row in rows]
    figure = Figure(figsize=(8, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    upper.plot(steps, [row["reward"] for row in rows], "o-", color="black", label="mean reward")
    upper.plot(steps, [row["opened"] for row in rows], "--", label="turn 1: box opened")
    upper.plot(steps, [row["said"] for row in rows], "--", label="turn 2: code said")
    upper.set(ylim=(0, 1.02), ylabel="mean over the batch")
    upper.legend(loc="lower right")
    upper.grid(alpha=0.3)
    lower.semilogy(steps, [row["largest_difference"] for row in rows], "o-", label="largest")
    lower.semilogy(steps, [row["mean_difference"] for row in rows], "o-", label="mean")
    lower.axhline(MAX_DIFFERENCE, color="red", linestyle=":", label="allowed")
    lower.set(xlabel="step", ylabel="log-probability,\nservice - trainer")
    lower.legend(loc="center", bbox_to_anchor=(0.5, 0.75), ncols=3, fontsize="small")
    lower.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def table(rows: Rows, found: Mapping[str, Any]) -> str:
    """Return the run as Markdown."""
    lines = [
        "# A training run",
        "",
        f"Mean reward {found['first_reward']:.3f} over the first three steps, "
        f"{found['last_reward']:.3f} over the last three: up by {found['rise']:.3f} in "
        f"{found['seconds']:.0f} s. The {found['tokens']} sampled tokens' log-probabilities differ "
        f"from the trainer's own by {found['largest_difference']:.1e} at most and "
        f"{found['mean_difference']:.1e} on average.",
        "",
        "| " + " | ".join(title for title, _ in COLUMNS.values()) + " |",
        "|" + "---:|" * len(COLUMNS),
    ]
    for row in rows:
        cells = [form.format(row[name]) for name, (_, form) in COLUMNS.items()]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Write train-demo.png, .md and .json."""
    parser = argparse.ArgumentParser(prog="python -m examples.train_demo.trainer.report")
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--results", type=Path, required=True)
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.rows.read_text().splitlines()]
    found = summary(rows)
    options.results.mkdir(parents=True, exist_ok=True)
    draw(rows, options.results / "train-demo.png")
    (options.results / "train-demo.md").write_text(table(rows, found))
    content = {"summary": found, "steps": rows}
    (options.results / "train-demo.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
