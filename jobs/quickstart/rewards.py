"""The quickstart's reward. Any function of any file can be one: its parameters say what it is given."""


def exact_number(completion: str, answer: str) -> float:
    """1.0 for a completion that is the number and nothing else, 0.0 for any other; `answer` is the row's column."""
    return float(completion.strip() == answer)
