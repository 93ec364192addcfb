"""One thread a process: tests run side by side, and two spinning threads on busy cores are far slower than one."""
from __future__ import annotations

import torch

torch.set_num_threads(1)
