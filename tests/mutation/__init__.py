"""Mutation testing: does a test fail when the code is wrong? See docs/notes/mutation.md."""
