"""The exit codes of all commands."""

DONE = 0
FAULT = 1  # a fault of ours, or a training that ended without saving
NOT_KEPT = 1  # `verify` found weights that are not as stated
MISTAKE = 2  # the user's input can't work
OVER_BUDGET = 3  # nothing fits the budget
STOPPED = 130  # stopped by a signal; the same command goes on
CUT_OFF = 141  # the reader of the output went away, as after SIGPIPE in a shell
