"""The long campaign of faults: random harm from a seed, and a judge of every byte. See docs/notes/faults.md."""
