"""Why a program cannot be traced."""

from __future__ import annotations


class Untraceable(Exception):
    """A program does something whose memory cannot be known without running it. The message is one sentence."""
