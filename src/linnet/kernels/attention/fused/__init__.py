"""Which attention modules of a model run fused attention, and what they run instead."""
