"""From a gradient spike to the token and the layer: the ladder, the reference search, verdict and attribution.

Everything here talks to a :class:`~lightning_rlstab.gradloc.oracle.GradientOracle`, so it runs against a real model, a
sharded one or a dictionary of vectors alike. Addresses are global (micro-batch, rank, sequence, token), decisions use
numbers that are equal on all ranks, and therefore every rank walks the same path.
"""
