"""Every error halfstep raises on purpose, and the exit code each one means.

HalfstepError            1    something failed; the message says what and where to look
├── RefusedInput         2    the request cannot be done as asked; nothing was started
├── NothingFitted        3    no attempt of the plan fitted in memory
├── Diverged             4    training produced numbers that mean nothing
│   └── NothingLearned   4    no group of completions differed in reward, in any precision
├── AttemptFailed        1    a training attempt ended for another reason than memory
├── ScorerFailed         1    a reward function raised or returned what is no list of finite numbers
└── ProgramFailed        1    a child program other than training ended without a result
"""

from typing import ClassVar


class HalfstepError(Exception):
    """An error whose message is written for a person and shown without a traceback."""

    exit_code: ClassVar[int] = 1


class RefusedInput(HalfstepError):
    """The request is impossible or contradicts itself: says what was asked, what was found, what to do."""

    exit_code = 2


class NothingFitted(HalfstepError):
    """Every attempt of the plan ran out of memory."""

    exit_code = 3


class Diverged(HalfstepError):
    """Training stopped because its numbers were no longer finite or no longer moved the weights."""

    exit_code = 4


class NothingLearned(Diverged):
    """No reward told one completion from another: another precision would not change that."""


class AttemptFailed(HalfstepError):
    """A training attempt failed for a reason that another precision cannot mend."""


class ScorerFailed(HalfstepError):
    """A reward function raised, or its result cannot be used; the message names the row."""


class ProgramFailed(HalfstepError):
    """A child program ended without writing its result."""
