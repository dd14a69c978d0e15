"""The kernels and the functions that launch them. Of the method (`md4.engine`), each is in these files:

    step 1         h_matrices
    steps 2 and 3  recurrence; [0]^(m) is in primitive_quartets, its formulas in `md4.method.zeros`
    step 4         two_products (`bra_transform`), or whole_panel where a panel of H fits shared memory
    step 5         two_products (`ket_transform`)
    steps 4 and 5  fused, fused_wide; plain, the readable one; one_product and summed_r where a side has two s shells
    steps 2 to 5   thread_quartet; digest_in_place, which also digests into J and K
    J and K        digestion, digest_rows, digest_mirrored; select_quartets
    J alone        hermite_coulomb, coulomb_threads, hermite_scales

Those of gradients, and of derivatives of K (half_exchange, exchange_derivatives), are in the table of `docs/design.md`.
"""
