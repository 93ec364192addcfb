"""What a command ends with."""

DONE = 0
FAULT = 1  # a fault of ours, or a training that ended without saving
NOT_KEPT = 1  # `verify` found weights that are not as stated
MISTAKE = 2  # what was asked for can't be done
OVER_BUDGET = 3  # nothing fits the budget
STOPPED = 130  # asked to stop; the same command goes on
CUT_OFF = 141  # nobody read all that it printed, as a shell tells of other programs
