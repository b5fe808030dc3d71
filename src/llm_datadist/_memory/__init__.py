"""Memory: devices, segments of bytes, pools over them, guards and write intents that protect what they hold."""
