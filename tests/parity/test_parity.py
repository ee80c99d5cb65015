"""The parity suite on every implementation that this machine has."""

from linnet.testing.test_parity import (
    test_autocast_gives_the_oracles_numbers_in_its_dtype,
    test_captured_graph_follows_changed_inputs,
    test_compiles_into_one_graph,
    test_dtype_and_strides_are_the_references,
    test_exports_as_portable_operations,
    test_gradients_are_the_oracles,
    test_inputs_are_left_alone,
    test_malformed_call_never_passes,
    test_no_uninitialised_memory_is_read,
    test_refusals_carry_a_reason,
    test_slot_has_cases,
    test_some_case_is_accepted,
    test_value_is_the_oracles,
)

__all__ = [
    "test_autocast_gives_the_oracles_numbers_in_its_dtype",
    "test_captured_graph_follows_changed_inputs",
    "test_compiles_into_one_graph",
    "test_dtype_and_strides_are_the_references",
    "test_exports_as_portable_operations",
    "test_gradients_are_the_oracles",
    "test_inputs_are_left_alone",
    "test_malformed_call_never_passes",
    "test_no_uninitialised_memory_is_read",
    "test_refusals_carry_a_reason",
    "test_slot_has_cases",
    "test_some_case_is_accepted",
    "test_value_is_the_oracles",
]
