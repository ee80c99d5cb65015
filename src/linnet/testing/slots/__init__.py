"""Oracles, cases and tolerances of linnet's own slots, one module for each.

The oracles are the definitions written out in float64, without a look at `linnet.reference`.
"""
