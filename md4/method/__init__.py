"""The mathematics of the method, and nothing of a device: angular momenta, operators, E and H, the recurrence, and what
symmetry says of integrals that are summed or stored. Device functions are plain Python."""
