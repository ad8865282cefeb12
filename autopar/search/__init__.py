"""The joint search: stages, schedule, micro-batches, recomputation, mesh and shardings together, with a certificate."""
