"""Older name of :mod:`llm_datadist.tools.bench`, kept for :mod:`llm_datadist.bench.worker`."""
