"""Demo: a prompt process computes a KV cache; a decoder process pulls it and generates tokens."""
