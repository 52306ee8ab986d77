"""Log-probs by transformers, float32: `python tests/reference_logprobs.py REQUEST.json` prints JSON.

Request: [{"model": DIR, "sequences": [[id, …], …], "temperature": 1.0}, …]. Answer, for each: one list per sequence,
of the log-prob of every token after the first.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def log_probs(model: str, sequences: list[list[int]], temperature: float) -> list[list[float]]:
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    answers = []
    with torch.no_grad():
        for sequence in sequences:
            ids = torch.tensor([sequence])
            logps = (policy(ids).logits[0, :-1] / temperature).log_softmax(-1)
            answers.append(logps.gather(1, ids[0, 1:, None])[:, 0].tolist())
    return answers


if __name__ == "__main__":
    torch.set_num_threads(1)
    requests = json.loads(Path(sys.argv[1]).read_text())
    print(json.dumps([log_probs(r["model"], r["sequences"], r.get("temperature", 1.0)) for r in requests]))  # noqa: T201
