"""md4's messages to Python's `logging`, under the name "md4".

INFO is what a calculation waits for, once for a version of md4: code that is compiled, and why md4-kernels cannot be
used instead. DEBUG is all else: the backend, lists that are made, each kernel, and memory that is given up. Programs
that show INFO, such as geomeTRIC, so show nothing of md4 at each step. A user sees DEBUG after `logging.basicConfig()`
and `logging.getLogger("md4").setLevel(logging.DEBUG)`; for the root logger, DEBUG would show Numba's messages, too.
"""

import logging

log = logging.getLogger("md4")
# A library is silent unless the program that uses it asks for its messages.
log.addHandler(logging.NullHandler())
