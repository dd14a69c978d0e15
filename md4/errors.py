"""The exceptions of md4. They form one small tree. Each is also the built-in exception that a caller would expect."""


class MD4Error(Exception):
    """Base of every error that md4 raises on purpose."""


class BasisError(MD4Error, ValueError):
    """A shell or a basis set cannot be used. The message names the shell, the wrong value and the remedy."""


class ArgumentError(MD4Error, ValueError):
    """An argument of a call cannot be used, such as a pair list, `out`, `aosym`, an operator or a slice."""


class UnsupportedError(MD4Error, NotImplementedError):
    """Something is requested that md4 does not offer. The message says what it offers."""


class MemoryLimitError(MD4Error, MemoryError):
    """The work does not fit into `max_memory` or the free memory. This is raised before anything is allocated."""


class DeviceError(MD4Error, RuntimeError):
    """There is no usable GPU, driver or CUDA compiler, or the GPU cannot do what is requested."""


class RankError(MD4Error, RuntimeError):
    """Another rank of the communicator failed, so this one cannot go on. The message has its number and its error."""
