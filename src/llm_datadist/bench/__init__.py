"""``llm-datadist bench``: this library against what the machine can do, and against others, byte by byte."""
