"""Predict training of a transformer on a cluster that is not here, from numbers alone: seconds of a step, bytes of a
device, best mesh.

transformer (the model), machines (the cluster), mesh (the parallelism), products (matrix products), block (a block's
work), sums (communication), step (a whole step), memory, and trace with caching_allocator (a device's memory),
best_mesh (the choice).
"""
