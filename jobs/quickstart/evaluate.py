"""Ask models the held-out sums, greedily, with transformers: `python -m jobs.quickstart.evaluate MODEL_DIR …`.

Prints one JSON object: directory -> {"correct": share of the sums that the reward of the training counts as right,
"bare": share that are the number and nothing else, "answers": the texts, in the order of holdout.jsonl}.
"""

import argparse
import json
import os
import tomllib
from pathlib import Path
from statistics import fmean

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from jobs.quickstart.rewards import exact_number

HERE = Path(__file__).resolve().parent
HOLDOUT = HERE / "holdout.jsonl"
SYSTEM_PROMPT = tomllib.loads((HERE.parent / "quickstart.toml").read_text(encoding="utf-8"))["data"]["system_prompt"]
BATCH = 50
ANSWER_TOKENS = 12


def answers(directory: Path, questions: list[str]) -> list[str]:
    """Greedy completions of chat prompts, special tokens left out."""
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").to(device).eval()
    chats = [[{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": asked}] for asked in questions]
    texts: list[str] = []
    for start in range(0, len(chats), BATCH):
        batch = tokenizer.apply_chat_template(
            chats[start : start + BATCH],
            add_generation_prompt=True,
            padding=True,
            return_dict=True,
            return_tensors="pt",
        ).to(device)
        with torch.inference_mode():
            out = model.generate(
                **batch, max_new_tokens=ANSWER_TOKENS, do_sample=False, pad_token_id=tokenizer.pad_token_id
            )
        texts += tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts


def evaluate(directory: Path) -> dict[str, object]:
    """Share of exact answers, and the answers."""
    rows = [json.loads(line) for line in HOLDOUT.read_text(encoding="utf-8").splitlines()]
    texts = answers(directory, [row["prompt"] for row in rows])
    right = fmean(exact_number(text, row["answer"]) for text, row in zip(texts, rows, strict=True))
    bare = fmean(text.strip() == row["answer"] for text, row in zip(texts, rows, strict=True))
    return {"correct": right, "bare": bare, "answers": texts}


def main() -> None:
    """Evaluate every directory of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL_DIR")
    models: list[Path] = parser.parse_args().models
    torch.set_num_threads(min(2, len(os.sched_getaffinity(0))))
    print(json.dumps({str(directory): evaluate(directory) for directory in models}))


if __name__ == "__main__":
    main()
