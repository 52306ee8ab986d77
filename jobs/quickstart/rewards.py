"""The quickstart's reward. Any function of any file can be one: its parameters say what it is given."""

import re


def exact_number(completion: str, answer: str) -> float:
    """1.0 if the last number of the completion is the answer, else 0.0; `answer` is the row's column.

    "22" counts, and so does "17 + 5 = 22."; "222" and "22 or 23" do not.
    """
    numbers = re.findall(r"\d+", completion)
    return float(bool(numbers) and numbers[-1] == answer)
