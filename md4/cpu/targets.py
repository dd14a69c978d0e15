"""Blocks of integrals on the CPU, and the AO tensor that takes them."""

from md4.cpu.loops import scatter_blocks


class HostBlock:
    """Integrals (ij, kl, ab, cd) in host memory, of any strides."""

    def __init__(self, array):
        self.array = array

    def swapped(self):
        """The same integrals with bra and ket exchanged."""
        return HostBlock(self.array.transpose(1, 0, 3, 2))

    def __getitem__(self, key):
        return HostBlock(self.array[key])


class HostTensor:
    """An AO tensor in host memory, filled block by block.

    Parameters
    ----------
    layout : md4.method.scatter.TensorLayout
    out : ndarray
        The tensor.
    """

    def __init__(self, layout, out):
        self.write, self.layout, self.out = scatter_blocks(layout.aosym), layout, out
        self.flat = out.reshape(-1)

    def add(self, block, bra, ket, basis, triangle):
        """Writes a block to all places of its integrals. If `triangle` is true, bra and ket are the same pairs."""
        bra, ket = bra.pairs.pairs, ket.pairs.pairs
        ao_bra, ao_ket, layout = basis.ao_loc[bra], basis.ao_loc[ket], self.layout
        self.write(block, bra, ket, ao_bra, ao_ket, triangle, layout.swap, layout.box, self.flat)

    def result(self):
        """The tensor."""
        return self.out
