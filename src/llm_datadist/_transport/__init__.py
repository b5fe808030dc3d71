"""How the bytes of a plan get from one process to another, and which way is the best.

Read :mod:`llm_datadist._transport.connection` first, then :mod:`llm_datadist._transport.inproc`.
"""
