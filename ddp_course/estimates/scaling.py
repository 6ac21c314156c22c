"""How far more ranks, and larger batches, take a job: speed-ups and the noise scale."""


def amdahl(n, serial):
    """The speed-up of a fixed amount of work of which a share cannot be divided.

    G. Amdahl, "Validity of the single processor approach to achieving large scale
    computing capabilities", 1967.
    """
    return 1 / (serial + (1 - serial) / n)


def gustafson(n, serial):
    """The speed-up if the part that can be divided grows with n, as weak scaling does.

    serial: the share of the time on n ranks. J. Gustafson, "Reevaluating Amdahl's law",
    1988.
    """
    return serial + (1 - serial) * n


def noise_scale(small, large, small_batch, large_batch):
    """The gradient noise scale, in samples: about the critical batch size.

    small, large: the mean squared norm of gradients over batches of these two sizes. S.
    McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, appendix A.1.
    """
    signal = (large_batch * large - small_batch * small) / (large_batch - small_batch)
    noise = (small - large) / (1 / small_batch - 1 / large_batch)
    return noise / signal
