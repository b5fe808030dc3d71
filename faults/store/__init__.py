"""The campaign against the prefix store: savers, readers and liars under kill -9, SIGSTOP, interrupts and flipped bits."""
