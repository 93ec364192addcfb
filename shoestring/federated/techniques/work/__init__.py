"""Work: what devices do in a round otherwise than plain local training, or beside it.

A work whose objective says where it begins (`Objective.start`) is beside the round's own, as that of Ditto's personal models is: techniques
that change the round's own work leave it as it is.
"""
