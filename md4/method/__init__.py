"""The mathematics of the method, without anything of a device.

This is angular momenta, operators, E and H, the recurrence of r, and the symmetry of integrals that are summed or
stored. Device functions are plain Python.
"""
