"""Make the two prompt files of the quickstart beside this script: `python jobs/quickstart/make_prompts.py`.

Every sum a + b with both numbers in 2 to 30 goes to one side: 100 pairs are held out, and neither a + b nor b + a of
such a pair is trained on.
"""

import json
import random
from pathlib import Path

HERE = Path(__file__).resolve().parent
SMALLEST, LARGEST = 2, 30
HELD_OUT = 100
SEED = 7


def prompt_row(a: int, b: int) -> dict[str, str]:
    """One line of a prompt file: what is asked, and the only answer that counts."""
    return {"prompt": f"{a} + {b} = ? Reply with the number only.", "answer": str(a + b)}


def split() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Training rows and held-out rows, both in a seeded order."""
    numbers = range(SMALLEST, LARGEST + 1)
    generator = random.Random(SEED)
    pairs = [(a, b) for a in numbers for b in numbers if a <= b]
    held_out = set(generator.sample(pairs, HELD_OUT))
    training = [(a, b) for a in numbers for b in numbers if (min(a, b), max(a, b)) not in held_out]
    generator.shuffle(training)
    turned = [pair if generator.random() < 1 / 2 else pair[::-1] for pair in sorted(held_out)]
    generator.shuffle(turned)
    return [prompt_row(a, b) for a, b in training], [prompt_row(a, b) for a, b in turned]


def main() -> None:
    """Write both files."""
    for name, rows in zip(("prompts.jsonl", "holdout.jsonl"), split(), strict=True):
        (HERE / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{name}: {len(rows)} rows")


if __name__ == "__main__":
    main()
