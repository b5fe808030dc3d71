"""The site that `make docs` builds, looked at in a browser."""
