"""Connectors with which inference engines use this library. Each needs its engine to be installed."""
