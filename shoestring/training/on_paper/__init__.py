"""Training a transformer on a cluster that is not here, from numbers alone: seconds of a step, bytes of a device, the best mesh.

transformer (the model), machines (the cluster), mesh (how it is spread), products (what matrix products take), block (a block's work),
sums (what workers send), step (all of a step), memory and trace with caching_allocator (what a device holds), best_mesh (the choice).
"""
