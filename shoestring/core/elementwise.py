"""Optimizers that look at every number of a weight alone, so that a part of a weight can be stepped without the rest."""
from __future__ import annotations

from torch import optim

ELEMENTWISE = (optim.Adam, optim.AdamW, optim.SGD, optim.RMSprop, optim.Adagrad, optim.Adadelta, optim.Adamax, optim.NAdam,
               optim.RAdam, optim.ASGD, optim.Rprop)
