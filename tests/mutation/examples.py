"""A plugin of pytest: Hypothesis tries the same examples for every mutant, and does not look for smaller ones."""

from hypothesis import Phase, settings


def pytest_configure() -> None:
    """Load the profile: after tests/conftest.py, which loads another one, and before any test is imported."""
    settings.register_profile("mutants", deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
    settings.load_profile("mutants")
