"""rlhfd's own options may stand anywhere on the line: they are moved to its front before it is parsed."""

from collections.abc import Sequence

WITH_VALUE = ("--socket", "--state-dir")
FLAGS = ("--debug",)


def hoist(argv: Sequence[str]) -> list[str]:
    """The same line with rlhfd's own options first; what follows a bare `--` stays.

    >>> hoist(["serve", "--state-dir", "/x"])
    ['--state-dir', '/x', 'serve']
    """
    own: list[str] = []
    rest: list[str] = []
    left = list(argv)
    while left:
        word = left.pop(0)
        if word == "--":
            return own + rest + ["--", *left]
        if word in FLAGS or word.startswith(tuple(f"{name}=" for name in WITH_VALUE)):
            own.append(word)
        elif word in WITH_VALUE:
            own += [word, *left[:1]]
            del left[:1]
        else:
            rest.append(word)
    return own + rest
