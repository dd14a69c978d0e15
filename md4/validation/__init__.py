"""Checks of md4's integrals by an oracle of any precision, by libcint and by identities, and reports on them."""
