"""Transports that execute copy plans between processes, and their selection.

Read :mod:`llm_datadist._transport.transport` first, then :mod:`llm_datadist._transport.inproc`, the simplest one.
"""
