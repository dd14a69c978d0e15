"""What md4's integrals are checked against: an oracle of any precision, libcint, identities; and reports of it."""
