"""Transports within one host: shm maps the peer's pools, cma copies its other memory; one rendezvous serves both.

Threads: a rendezvous runs in the thread that dials, and at the listener on the control thread. Bytes move in the
caller's thread and the native copy threads.
"""
