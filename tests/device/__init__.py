"""Memory of a GPU without a GPU: a fake driver, an interpreter of the kernel, and tests of both."""
