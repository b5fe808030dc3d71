"""Memory: devices, segments, pools, and the guards and write intents that protect their content."""
