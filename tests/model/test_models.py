"""The models say what the source does. ``make model`` runs them."""

from tests.model import check


def test_the_models_quote_the_source_as_it_is() -> None:
    assert check.mistakes() == []
