"""The exceptions that md4 raises: one small tree, each also the built-in that a caller would expect."""


class MD4Error(Exception):
    """Base of every error that md4 raises on purpose."""


class BasisError(MD4Error, ValueError):
    """A shell or a basis set that cannot be used: it names the shell, the offending value and the remedy."""


class ArgumentError(MD4Error, ValueError):
    """An argument of a call that cannot be used: pair lists, `out`, `aosym`, operator, slices."""


class UnsupportedError(MD4Error, NotImplementedError):
    """Something md4 does not offer; the message lists what it does."""


class MemoryLimitError(MD4Error, MemoryError):
    """Work that cannot fit into `max_memory` or the memory there is; refused before anything is allocated."""


class DeviceError(MD4Error, RuntimeError):
    """No usable GPU, driver or CUDA compiler for `backend='cuda'`."""
