"""rlhfd: a daemon that post-trains language models with reinforcement learning, without losing a token."""

__version__ = "0.1.0"
