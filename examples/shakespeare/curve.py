"""Draws the loss of a run's log.jsonl in the terminal, one bar for each tenth of the run."""

import json
import sys


def main() -> None:
    with open(sys.argv[1], encoding="utf8") as file:
        losses = [r["loss"] for r in map(json.loads, file) if r["log"] == "step"]
    width = max(1, len(losses) // 16)
    means = [
        sum(part) / len(part)
        for i in range(0, len(losses), width)
        if (part := losses[i : i + width])
    ]
    for number, mean in enumerate(means):
        bar = "#" * round(60 * mean / max(means))
        print(f"step {number * width + 1:5d}  {mean:6.3f}  {bar}")


if __name__ == "__main__":
    main()
