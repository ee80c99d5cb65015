"""The parity suite: every implementation of every slot against the slot's definition.

    pytest --pyargs linnet.testing                         every implementation, on the CPU
    pytest --pyargs linnet.testing --provider NAME         implementations of that name only
    pytest --pyargs linnet.testing --device cuda           on the current CUDA device
    pytest --pyargs linnet.testing --slot silu_mul         one slot
    pytest --pyargs linnet.testing -m slow                 the full-sized cases

A package with implementations of its own needs no more than that: it is found as the registry finds
it. A slot of its own brings its cases along: `define(..., cases=Cases(...))`, or the name of the
module that holds them, "my_package.my_cases:CASES"; see `linnet.testing.cases`.
"""
