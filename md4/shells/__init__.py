"""Shells of Gaussian functions, basis sets, lists of shell pairs, and their Schwarz bounds."""
