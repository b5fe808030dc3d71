"""The verbs: pull, push, copy, swap, layer by layer; at the initiator and at the target."""
