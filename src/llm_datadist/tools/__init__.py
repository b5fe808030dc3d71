"""The command ``llm-datadist`` with its benchmark, demo and doctor. The rest of the library imports none of it."""
