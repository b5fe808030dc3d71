"""Transfers: pulls, pushes, copies, swaps and layer-wise jobs, at the initiator and at the target."""
